# What a developer types; `make` alone lists it. Needs Python 3.11 or newer and a package index, nothing else.
PYTHON ?= python3

# An index serves torch's CUDA build to one Python and its CPU build to another; which one, the target below says.
CUDA_PYTHON ?= python3

BIN := .venv/bin
CUDA := .venv-cuda
LOCK := requirements/lock.txt
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input

# .venv/.begun becomes .venv/.done when everything is installed. Found at the start, it tells of an interrupted
# run, whose half-written packages pip would trust: the environment is then made anew.
BEGUN := .venv/.begun
DONE := .venv/.done

.PHONY: help venv train test-quick test test-all test-cuda-build lint verify-table verify-rules free-runs search-table programs operators standin first-look models options bench bench-peers verify-grpc growth faults resumes same-bits browser wan clean
.DEFAULT_GOAL := help

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(DONE) ## Make .venv with the pinned packages and roundelay itself
	@:

train: $(DONE) ## Train the example, a small character-level GPT
	@$(BIN)/roundelay train examples/char_gpt.py --workers 2

QUICK := tests/ir tests/lower tests/planner tests/actor tests/observe tests/contracts tests/test_schedules.py \
	tests/test_simulator.py tests/equivalence/test_verify.py
SLOW := shm or gloo or grpc or nccl or test_priced or staggered or (test_verify and not schedule_of_rates)

test-quick: $(DONE) ## Run what needs neither torch nor processes, the contracts, and one model's proof (1 minute)
	@$(BIN)/pytest --sample -n 2 --dist loadfile $(QUICK) -k "not ($(SLOW))"

test: $(DONE) ## Run a sample of the tests that turns with every commit, on two processes (10 minutes)
	@$(BIN)/pytest --sample -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(DONE) ## Run all tests, on two processes (45 minutes)
	@$(BIN)/pytest -n 2 --dist loadfile

test-cuda-build: $(CUDA)/.done ## Run what forks on torch's CUDA build, without a GPU: an environment of 5 GB; CUDA_PYTHON=python3.12
	@$(CUDA)/bin/pytest -n 2 --dist loadfile tests/api tests/runtime tests/transport tests/resume
	@OMP_NUM_THREADS=1 $(CUDA)/bin/python -m tests.runtime.stand_in never every_rule
	@OMP_NUM_THREADS=1 $(CUDA)/bin/roundelay doctor

lint: $(DONE) ## Check style, formatting, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

browser: $(DONE) ## Look at the pages in a headless Chromium; fails where there is none (1 minute)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ echo "No chromium, chromium-browser or google-chrome on PATH: nothing was looked at."; exit 1; }
	@$(BIN)/pytest tests/page/test_browser.py

wan: $(DONE) ## Run what needs machines with slow lines between them, in namespaces; fails where there are none (1 minute)
	@$(BIN)/python -m tests.wan.bed
	@$(BIN)/pytest tests/wan

programs: $(DONE) ## Train every program of tests/programs under torchrun, and compare with one process (25 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.programs.launched

operators: $(DONE) ## Check PyTorch's samples of its operators on tensors that lie in every way over workers (30 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.op_samples

verify-table: verify-rules ## Print the tables of equivalences, each line computed now: of rules, of models (hours)
	@$(BIN)/python -m tests.equivalence.table

verify-rules: $(DONE) ## The first of these alone; SHORT=--short takes minutes
	@$(BIN)/python -m tests.equivalence.rules_table $(SHORT)

free-runs: $(DONE) ## Replay 30 runs whose order is free (3 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.equivalence.free_runs --runs 30

verify-grpc: $(DONE) ## 40 cells of the table of models, by lot, with workers that prove to each other who they are (10 minutes)
	@$(BIN)/python -m tests.equivalence.table --transport grpc --sample 40 --seed 5 --models skip batchnorm tied_head mlp token_mean

search-table: $(DONE) ## Compare the search with experts, brute force and HiGHS on random models, graphs and GPTs (hours)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.search.long

standin: $(DONE) ## Run every rule, option and model on a stand-in for a GPU, print the table (10 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.standin.table

first-look: $(DONE) ## Rehearse on the CPU what benchmarks/gpu/first_look shows on a GPU (2 minutes)
	@$(BIN)/python -m benchmarks.gpu.first_look --devices cpu

models: $(DONE) ## Verify networks and library models under each rule on 2 to 4 stages, print the table
	@$(BIN)/python -m tests.models.table

options: $(DONE) ## Verify each option under each rule; ignore each one, see its test fail; OPTIONS=--compile compiles too
	@$(BIN)/python -m tests.options.every_rule $(OPTIONS)
	@$(BIN)/python -m tests.options.table

bench: $(DONE) ## Run the short form of every benchmark; the machine must be quiet
	@for name in $(patsubst benchmarks/%/run.py,%,$(wildcard benchmarks/*/run.py)); do \
	  echo; echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.$$name.run --short $(BENCH) || exit 1; \
	done

PEERS := assumptions capacity ends messages refusals time_to_loss unequal
bench-peers: $(DONE) ## Run the short form of every benchmark of hosted runs, in namespaces with slow lines (30 minutes)
	@for name in $(PEERS); do \
	  echo; echo "== $$name"; OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.peers.$$name --short $(BENCH) || exit 1; \
	done

growth: $(DONE) ## Train 10,000 updates over each transport; print the bytes that each takes, in every process
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.runtime.growth

faults: $(DONE) ## Strike 160 runs, and 60 under torchrun, with signals and errors at random moments; print the tables
	@$(BIN)/python -m tests.faults.table
	@$(BIN)/python -m tests.faults.launched

resumes: $(DONE) ## Kill 80 runs at random moments, go on from their checkpoints, compare every bit
	@$(BIN)/python -m tests.resume.table

same-bits: $(DONE) ## Run 146 small jobs with the source of a commit and this, go on from its checkpoints: no bit differs; AGAINST=COMMIT
	@$(BIN)/python -m tests.same_bits $(if $(AGAINST),--against $(AGAINST)) $(if $(ONLY),--only "$(ONLY)")
	@$(BIN)/python -m tests.same_bits.checkpoint $(if $(AGAINST),--against $(AGAINST))

clean: ## Delete caches and build outputs; .venv and runs/ stay
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(wildcard $(BEGUN)),)
.PHONY: $(BIN)/python
endif

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Roundelay needs Python 3.11 or newer; got $(PYTHON) = $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "make: Name another interpreter: make venv PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@rm -rf .venv/* && mkdir -p .venv && touch $(BEGUN)
	@$(PYTHON) -m venv .venv

# Torch goes first and alone, with whatever its build for this machine needs; nothing after it may replace it.
$(DONE): $(BIN)/python pyproject.toml $(LOCK)
	@touch $(BEGUN)
	@echo "Installing $$(grep '^torch==' $(LOCK)) (large: minutes, the first time)"
	@$(PIP) install --constraint $(LOCK) torch
	@echo "Installing the other packages of $(LOCK)"
	@$(PIP) install --no-deps --requirement $(LOCK)
	@echo "Installing roundelay itself, editable"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check >/dev/null || $(BIN)/python -m pip check
	@mv $(BEGUN) $(DONE)

$(CUDA)/.done: pyproject.toml $(LOCK)
	@rm -rf $(CUDA) && $(CUDA_PYTHON) -m venv $(CUDA)
	@echo "Installing $$(grep '^torch==' $(LOCK)) for $$($(CUDA_PYTHON) --version) (gigabytes: minutes)"
	@$(CUDA)/bin/python -m pip -qq --disable-pip-version-check --no-input install --constraint $(LOCK) torch
	@$(CUDA)/bin/python -c 'import sys, torch; sys.exit(None if torch.version.cuda else "make: the index serves \
	  torch " + torch.__version__ + ", no CUDA build, to this Python; name another: CUDA_PYTHON=python3.12")'
	@$(CUDA)/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-deps --requirement $(LOCK)
	@$(CUDA)/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-deps --no-build-isolation --editable .
	@touch $@
