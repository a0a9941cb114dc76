"""Whatever is wrong with what a person gives is told on one screen, and nothing is left half-made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.harness import MLP, Said, here, job_file, one_screen

Capture = pytest.CaptureFixture[str]
ASYNC = ("--workers", "2", "--rule", "pipeoptim")
SMALL = (*ASYNC, "--steps", "5", "--no-baseline")

LATER = """
def at(number, change):
    def batches(epoch):
        for i, batch in enumerate(mlp.batches(epoch)):
            yield change(batch) if i == number else batch
    return batches

class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x

NET = mlp.model()

class WithoutRate(torch.optim.Optimizer):
    def __init__(self, named):
        super().__init__(named, {})

class Demanding(torch.optim.SGD):
    def step(self, closure=None):
        raise AttributeError("no gradient")

class Pair(list):
    def __init__(self, x, y):
        super().__init__([x, y])
"""

JOBS = {
    "a loss that is no scalar": ("loss=lambda o, b: o", "the loss", "(8, 3)", ".mean()"),
    "labels that are missing": ("loss=lambda o, b: b['labels'].sum()", "KeyError: 'labels'", "'x', 'y'"),
    "LBFGS": ("optimizer=lambda n: torch.optim.LBFGS([p for _, p in n])", "LBFGS", "closure", "AdamW"),
    "an optimizer that raises": ("optimizer=lambda n: 1 / 0", "Job(optimizer=...)", "ZeroDivisionError"),
    "no optimizer": ("optimizer=lambda n: 3", "Job(optimizer=...)", "a int"),
    "an optimizer of parameters that it was not given": (
        "model=NET, optimizer=lambda n: torch.optim.SGD(NET.parameters(), lr=0.1)",
        "Job(optimizer=...), SGD",
        "not given, such as one of model.parameters()",
        "lambda named:",
    ),
    "an optimizer without a learning rate": ("optimizer=WithoutRate", "WithoutRate", "lr = 'nothing'", "lr=3e-4"),
    "an optimizer whose schedule cannot be run ahead": (
        "optimizer=lambda n: Demanding(n, lr=0.1), scheduler=lambda o: torch.optim.lr_scheduler.ConstantLR(o)",
        "Demanding, with a scheduler",
        "AttributeError in a step without gradients",
    ),
    "a batch of a kind that cannot be made again": (
        "batches=lambda e: [Pair(*b.values()) for b in mlp.batches(e)]",
        "the batch, a Pair",
        "TypeError",
        "must be constructed as dict or list are",
    ),
    "ReduceLROnPlateau": (
        "scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau",
        "ReduceLROnPlateau",
        "no Job(evaluate=...)",
    ),
    "a scheduler that raises": ("scheduler=lambda o: 1 / 0", "Job(scheduler=...)", "ZeroDivisionError"),
    "no scheduler": ("scheduler=lambda o: 3", "Job(scheduler=...)", "a int"),
    "no model": ("model=3", "Job(model=...)", "torch.nn.Module"),
    "an optional field of a wrong kind": ("evaluate=3", "Job(evaluate=...)", "None"),
    "steps of a wrong kind": ("steps=0", "Job(steps=...)", "at least 1"),
    "no batches at all": ("batches=lambda e: []", "batches(0)", "no batch", "drop_last"),
    "batches that are no iterable": ("batches=lambda e: None", "batches(0)", "not iterable"),
    "a loader that raises": ("batches=lambda e: 1 / 0", "batches(0)", "ZeroDivisionError"),
    "rows that disagree": (
        "batches=lambda e: [{'x': torch.ones(3, 6), 'y': torch.ones(4)}]",
        "the loss on the first batch",
        "Call the loss by hand",
    ),
    "a batch without tensors": ("batches=lambda e: [3, 4]", "the batch", "without any tensor"),
    "inputs that return nonsense": ("inputs=lambda b: 3", "Job(inputs=...)", "a tuple and a dict"),
    "inputs that raise": ("inputs=lambda b: b['nope']", "Job(inputs=...)", "KeyError: 'nope'"),
    "a model whose parts do not fit": (
        "model=nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(5, 3))",
        "'2' (Linear)",
        "shapes cannot be multiplied",
        "takes the job's first batch",
        "without Roundelay, too",
    ),
    "a number outside of the model's vocabulary": (
        "model=nn.Embedding(9, 3), inputs=lambda b: ((b['y'] + 9,), {})",
        "the model (Embedding)",
        "IndexError: index out of range",
        "without Roundelay, too",
    ),
    "a model that cannot be exported": (
        "model=nn.Sequential(nn.Linear(6, 6), Branch(), nn.Linear(6, 3))",
        "'1' (Branch)",
        "if x.sum() > 0",
        "job.py:14",
        "torch.where",
    ),
}


def told(capsys: Capture, *args: object) -> Said:
    """Run a command that must fail, and see that it left nothing."""
    before = set(os.listdir())
    said = here(capsys, *args)
    assert set(os.listdir()) == before, "something was left"
    return said


@pytest.mark.parametrize("case", JOBS)
def test_a_part_of_the_job_that_cannot_be_used_is_named(capsys: Capture, workplace: Path, case: str) -> None:
    changes, *words = JOBS[case]
    job = job_file(workplace, changes, LATER)
    one_screen(told(capsys, "train", job, *SMALL), *words)


FILES = {
    "a syntax error": ("def job(:\n", "line 1", "invalid syntax"),
    "no function job": ("x = 1\n", "no function called job", "defines x"),
    "another result": ("def job(seed):\n    return 3\n", "returned a int"),
    "no argument": ("def job():\n    return 3\n", "takes 0 positional arguments"),
    "an exception at import": ("x = 1\nimport nonexistent\n", "line 2", "nonexistent"),
    "an exception in job()": ("def job(seed):\n    x = 1\n    return x / 0\n", "line 3", "ZeroDivisionError"),
    "an exit at import": ("import sys\nsys.exit(0)\n", "line 2", "SystemExit: 0"),
    "a message without end": ("raise ValueError('word ' * 9999 + 'row\\n' * 999)\n", "ValueError: word", "..."),
}


@pytest.mark.parametrize("case", FILES)
def test_a_job_file_that_cannot_be_read_is_told_with_its_line(capsys: Capture, workplace: Path, case: str) -> None:
    text, *words = FILES[case]
    path = workplace / "bad.py"
    path.write_text(text)
    one_screen(told(capsys, "train", path), "job file", "bad.py", *words, "def job(seed: int) -> roundelay.Job")


def test_a_syntax_error_in_what_a_job_file_imports_is_told_with_its_own_file(capsys: Capture, workplace: Path) -> None:
    (workplace / "helper_of_mine.py").write_text("x = 1\ny = (\n")
    (workplace / "bad.py").write_text("import helper_of_mine\n")
    one_screen(
        told(capsys, "train", workplace / "bad.py"), "bad.py", "line 1: SyntaxError", "(helper_of_mine.py, line 2)"
    )


def test_a_job_file_that_is_none_is_told(capsys: Capture, workplace: Path) -> None:
    one_screen(told(capsys, "train", "nowhere.py"), "nowhere.py", "no such file")
    one_screen(told(capsys, "train", workplace), "a folder")
    (workplace / "text.txt").write_text("x")
    one_screen(told(capsys, "train", "text.txt"), "no Python file")
    (workplace / "bytes.py").write_bytes(b"x = '\xff'")
    one_screen(told(capsys, "train", "bytes.py"), "line 1")


OPTIONS = {
    "more workers than pieces": (("--workers", "40"), "a cut into 40 stages", "10 stages at most", "--workers 10"),
    "no workers": (("--workers", "0"), "workers", "at least 1"),
    "an unknown rule": (("--rule", "foo"), "'foo'", "gpipe, 1f1b, zb-h1, zb-v, pipedream", "register_rule"),
    "no micro-batches": (("--micro-batches", "0"), "micro_batches", "at least 1"),
    "a predictor that nobody asks": (("--rule", "gpipe", "--predictor", "paper"), "predictor", "'gpipe'"),
    "a backward that the rule forbids": (("--rule", "pipedream", "--backward", "mixed"), "backward", "one of stash"),
    "a module that is not there": (("--recompute", "7,layers.*"), "recompute", "'layers.*'", "such as"),
    "what is kept in any case": (("--recompute", "0"), "recompute", "'0'", "but its inputs and outputs"),
    "an unknown transport": (("--transport", "pigeon"), "transport", "memory, shm, gloo, grpc, nccl"),
    "a device that is not here": (("--devices", "cuda:9999,cpu"), "cuda:9999: no such device here", "--devices cpu"),
    "an unknown device": (("--devices", "tpu,cpu"), "workers[0].device", "'tpu'"),
    "devices for other workers": (
        ("--workers", "2", "--devices", "cpu,cpu,cpu"),
        "--devices",
        "3 devices for 2 workers",
    ),
    "no patience": (("--deadline-s", "0"), "deadline_s", "more than 0 seconds", "--deadline-s"),
    "no steps": (("--steps", "0"), "--steps", "at least 1"),
    "negative epochs": (("--epochs", "-1"), "--epochs", "at least 1"),
    "both lengths": (("--steps", "3", "--epochs", "1"), "--steps and --epochs", "one of them"),
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("command", ["train", "verify"])
def test_an_option_that_cannot_be_obeyed_is_named(capsys: Capture, command: str, case: str) -> None:
    options, *words = OPTIONS[case]
    said = told(capsys, command, MLP, *options)
    one_screen(said, *words)
    assert said.code == 2


def test_nccl_asks_for_devices_or_a_launcher_before_anything_is_planned(capsys: Capture) -> None:
    one_screen(
        told(capsys, "train", MLP, "--transport", "nccl"), "without a launcher", "torchrun", "--transport memory"
    )
    one_screen(
        told(capsys, "verify", MLP, "--transport", "nccl"), "`roundelay verify` over nccl", "Leave --transport out"
    )


def test_an_option_that_does_not_exist_or_has_a_wrong_kind_is_told(capsys: Capture) -> None:
    for args in (("train",), ("train", MLP, "--foo"), ("train", MLP, "--workers", "two"), ("simulate", "--batches", 0)):
        said = told(capsys, *args)
        assert said.code == 2
        assert "Traceback" not in said.err
        assert "help" in said.err.lower()


PLANS = {
    "bytes": (b"\xff\xfe\x00", "p.toml", "decode"),
    "no TOML": (b"format = 1\nrule=", "the plan", "Invalid value"),
    "nothing": (b"", "format of the plan", "None"),
    "another format": (b"format = 99", "format of the plan", "99"),
    "no stages": (b"format = 7", "no [[workers]]"),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_garbled_plan_is_refused_by_every_command(capsys: Capture, workplace: Path, case: str) -> None:
    text, *words = PLANS[case]
    (workplace / "p.toml").write_bytes(text)
    one_screen(told(capsys, "simulate", "p.toml"), *words)
    one_screen(told(capsys, "train", MLP, "--plan", "p.toml"), *words)


def test_a_plan_that_does_not_fit_is_refused(capsys: Capture, workplace: Path) -> None:
    here(capsys, "plan", MLP, *ASYNC, "-o", "p.toml")
    other = job_file(workplace, "model=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))")
    one_screen(told(capsys, "train", other, "--plan", "p.toml"), "the plan's model", "fingerprint", "the model of this")
    one_screen(told(capsys, "train", MLP, "--plan", "p.toml", "--workers", 3), "--workers with --plan", "3", "2")
    one_screen(told(capsys, "verify", MLP, "--plan", "p.toml", "--rule", "1f1b"), "--rule with --plan", "pipeoptim")
    for path in ("nix.toml", workplace):
        one_screen(told(capsys, "train", MLP, "--plan", path), "plan file", "roundelay plan")


def test_what_cannot_be_written_is_told_before_training(capsys: Capture, workplace: Path) -> None:
    (workplace / "file").write_text("mine")
    (workplace / "full").mkdir()
    (workplace / "full" / "mine").write_text("mine")
    one_screen(told(capsys, "train", MLP, *SMALL, "--out", "file/run"), "run folder file/run", "Not a directory")
    one_screen(told(capsys, "train", MLP, *SMALL, "--out", "full"), "run folder full", "not empty")
    never = job_file(workplace, "batches=lambda e: 1 / 0")  # it is not asked for data before that is known
    one_screen(told(capsys, "train", never, *SMALL, "--out", "full"), "run folder full", "not empty")
    one_screen(told(capsys, "report", "full"), "run folder full", "no plan.toml", "curves.html")
    one_screen(told(capsys, "train", MLP, *SMALL, "--out", "latest"), "latest")
    one_screen(told(capsys, "plan", MLP, "-o", "file/plan"), "file/plan", "Not a directory")
    here(capsys, "plan", MLP, *ASYNC, "-o", "p.toml")
    one_screen(told(capsys, "simulate", "p.toml", "--trace", "file/trace"), "file/trace", "Not a directory")
    assert os.listdir("full") == ["mine"]


def test_a_checkpoint_that_is_none_or_of_another_model_is_refused(capsys: Capture, workplace: Path) -> None:
    one_screen(told(capsys, "train", MLP, *SMALL, "--from", "nowhere"), "checkpoint nowhere", "nothing at this place")
    assert here(capsys, "train", MLP, *SMALL, "--out", "run").code == 0
    other = job_file(workplace, "model=nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))")
    one_screen(told(capsys, "train", other, *SMALL, "--from", "run"), "checkpoint run", "'0.weight'", "(16, 6)")
    short, long = (f"model=nn.Sequential(nn.Linear(6, 3), Table({size}))" for size in (4, 5))
    table = (
        "class Table(nn.Module):\n"
        "    def __init__(self, size):\n"
        "        super().__init__()\n"
        "        self.register_buffer('cos', torch.ones(size))\n"
        "    def forward(self, x):\n"
        "        return x * self.cos[:3]\n"
    )
    assert here(capsys, "train", job_file(workplace, short, table), *SMALL, "--out", "short").code == 0
    job = job_file(workplace, long, table)
    refused = told(capsys, "train", job, *SMALL, "--from", "short")
    one_screen(refused, "checkpoint short", "1.cos", "wrote the checkpoint")


def test_debug_shows_the_traceback_and_its_levels_are_checked(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_DEBUG", "1")
    said = told(capsys, "train", MLP, "--rule", "foo")
    assert "Traceback" in said.err
    assert said.code == 2
    monkeypatch.setenv("ROUNDELAY_DEBUG", "7")
    said = told(capsys, "plan", MLP)
    one_screen(said, "ROUNDELAY_DEBUG", "'7'", "0 (nothing)", "4 (")
    assert said.code == 2


def test_a_wrong_word_for_malloc_is_refused(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_MALLOC", "kep")
    said = told(capsys, "plan", MLP)
    one_screen(said, "ROUNDELAY_MALLOC", "'kep'", "keep (")
    assert said.code == 2


def test_with_json_an_error_is_one_object_too(capsys: Capture) -> None:
    said = told(capsys, "train", MLP, "--rule", "foo", "--json")
    assert said.json["error"]["kind"] == "PlanError"
    assert said.json["error"].keys() == {"kind", "subject", "got", "expected", "remedy"}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train",), ("`roundelay train`", "'JOB.py'")),
        (("train", MLP, "--restarts", "-1"), ("--restarts", "greater than or equal to 0")),
        (("compare", MLP, "--nonsense"), ("`roundelay compare`", "--nonsense")),
        (("nothing",), ("'nothing'", "`roundelay --help`")),
    ],
)
def test_a_command_line_that_is_misspelt_is_told_like_all_else(
    capsys: Capture, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    one_screen(here(capsys, *command), *words)
    said = here(capsys, *command, "--json")
    assert (said.code, said.json["error"]["kind"]) == (2, "UsageError")
