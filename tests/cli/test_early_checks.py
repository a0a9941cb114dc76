"""What can be judged from the command line alone is told before the job is run; names before torch is loaded."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import roundelay
from roundelay.cli.registered_rules import may_register_rules
from roundelay.errors import PlanError, UsageError
from roundelay.ir import rule
from roundelay.planner.plan_options import Choices
from roundelay.planning.check_here import check_here
from tests.cli.harness import MLP, environment, here, one_screen
from tests.equivalence.cells import bench

Capture = pytest.CaptureFixture[str]

JOB = "import pathlib\n\npathlib.Path('ran').touch()\n"

CHOICES = {
    "a misspelt rule": (("--rule", "1flb"), "the update rule", "Did you mean 1f1b?"),
    "a misspelt layout": (("--layout", "sinlge"), "--layout", "Did you mean single?"),
    "a misspelt predictor": (
        ("--rule", "pipeoptim", "--predictor", "papr"),
        "predictor of the plan",
        "Did you mean paper?",
    ),
    "a misspelt backward": (("--backward", "stsh"), "backward of the plan", "Did you mean stash?"),
    "a misspelt transport": (("--transport", "memry"), "transport of the plan", "Did you mean memory?"),
    "a misspelt precision": (("--precision", "bf61"), "precision of the plan", "Did you mean bf16?"),
    "a predictor of another rule": (("--rule", "rehearse", "--predictor", "paper"), "rule 'rehearse' predicts"),
    "a mode that the rule forbids": (("--rule", "async", "--backward", "stash"), "rule 'async' allows these"),
    "a layout that the rule has not": (("--rule", "pipedream", "--layout", "dp"), "rule of the plan, with layout dp"),
    "workers of a layout": (("--rule", "cdp-v1", "--layout", "dp", "--workers", "2"), "--workers with layout dp"),
    "stages of a pipeline": (("--stages", "2"), "--stages with layout pipeline"),
    "global clipping without a flush": (("--rule", "async", "--clip", "global:1"), "which never flushes"),
    "another clipping": (("--clip", "globl:1"), "clip of the plan", "'globl:1'"),
    "split states of one replica": (("--zero", "1"), "--zero 1", "--data-parallel 2 or more"),
    "split states of partial predictions": (
        ("--rule", "rehearse", "--zero", "1", "--data-parallel", "2", "--workers", "2"),
        "predictor of the plan, with split states",
    ),
    "signatures beside tensor-parallel": (
        ("--signatures", "some.toml", "--tensor-parallel", "2"),
        "--signatures with --tensor-parallel",
    ),
    "a file of signatures that is not there": (("--signatures", "some.toml"), "the file of signatures some.toml"),
    "a mesh with a mode that runs stages as a whole": (
        ("--rule", "1f1b", "--tensor-parallel", "2", "--backward", "recompute"),
        "backward of the plan, with a mesh",
    ),
    "a loss scale in fp32": (("--loss-scale", "dynamic"), "loss_scale of the plan", "none: gradients in fp32"),
    "no loss scale in fp16": (("--precision", "fp16", "--loss-scale", "none"), "loss_scale of the plan"),
    "an average of nothing": (("--ema", "1"), "ema of the plan"),
    "modules of a mode that recomputes all": (
        ("--rule", "1f1b", "--backward", "recompute", "--recompute", "all"),
        "recompute of the plan",
    ),
    "compiled halves": (("--rule", "zb-v", "--compile"), "compile of the plan", "'zb-v'"),
    "bytes that are none": (("--memory-limit", "8Gb"), "--memory-limit", "Give 8GiB"),
    "no workers": (("--workers", "0"), "workers", "at least 1"),
    "no micro-batches": (("--micro-batches", "0"), "micro_batches", "at least 1"),
    "no patience": (("--deadline-s", "-1"), "deadline_s", "more than 0 seconds"),
    "an unknown device": (("--devices", "tpu,cpu"), "workers[0].device", "'tpu'"),
    "devices for other workers": (("--workers", "2", "--devices", "cpu,cpu,cpu"), "3 devices for 2 workers"),
    "a device that a transport does not carry": (("--devices", "cuda", "--transport", "shm"), "cuda:0 with transport"),
    "a device that is not here": (("--devices", "cuda:9999,cpu"), "cuda:9999: no such device here"),
}

LENGTHS = {
    "no steps": (("--steps", "0"), "--steps", "at least 1"),
    "both lengths": (("--steps", "3", "--epochs", "1"), "--steps and --epochs"),
}

OF_TRAIN = {
    "nccl without devices": (("--transport", "nccl"), "without a launcher"),
    "a misspelt check": (("--check", "ful"), "--check", "Did you mean full?"),
    "a plan that is not there": (("--plan", "no.toml"), "plan file no.toml"),
    "a folder that is taken": (("--out", "."), "not empty"),
}

OF_VERIFY = {
    "nccl": (("--transport", "nccl"), "`roundelay verify` over nccl"),
    "a misspelt way to tamper": (("--tamper", "stach"), "--tamper", "Did you mean stash?"),
}

OF_COMPARE = {
    "a misspelt rule": (("--rules", "1f1b,pipeoptm"), "the update rule", "Did you mean pipeoptim or gpipe?"),
    "a misspelt predictor": (("--rules", "pipeoptim:papr"), "--rules", "Did you mean paper?"),
    "a misspelt optimizer": (("--optimizers", "adamv"), "--optimizers", "Did you mean adam or adamw?"),
    "a rate of none": (("--optimizers", "adam", "--lr", "adam=fast"), "--lr", "adam=fast"),
    "a misspelt transport": (("--transport", "memry"), "transport of the plan", "Did you mean memory?"),
    "nccl": (("--transport", "nccl"), "`roundelay compare` over nccl"),
    "no steps": (("--steps", "0"), "--steps", "at least 1"),
    "a device that is not here": (("--devices", "cuda:9999"), "no such device here"),
}


def cases() -> Iterator[object]:
    """Each command with each error."""
    for command, errors in {
        "train": CHOICES | LENGTHS | OF_TRAIN,
        "verify": CHOICES | LENGTHS | OF_VERIFY,
        "plan": CHOICES,
        "compare": OF_COMPARE,
    }.items():
        for name, (options, *words) in errors.items():
            yield pytest.param(command, options, words, id=f"{command}: {name}")


@pytest.fixture
def job(workplace: Path) -> Path:
    """A job file that leaves a mark when it is run."""
    (workplace / "job.py").write_text(JOB)
    return workplace / "job.py"


@pytest.mark.parametrize(("command", "options", "words"), list(cases()))
def test_an_error_of_choices_is_told_before_the_job_is_run(
    capsys: Capture, job: Path, command: str, options: tuple[str, ...], words: list[str]
) -> None:
    said = here(capsys, command, job, *options)
    one_screen(said, *words)
    assert said.code == 2
    assert not (job.parent / "ran").exists()


def test_the_job_is_run_when_nothing_is_wrong(capsys: Capture, job: Path) -> None:
    for command in ("train", "verify", "plan", "compare"):
        one_screen(here(capsys, command, job), "no function called job")
        (job.parent / "ran").unlink()


WITHOUT_TORCH = """
import sys
from roundelay.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_a_misspelt_rule_is_told_in_a_second_without_torch(job: Path) -> None:
    """Seconds of computing: how long a busy machine lets it wait is another matter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "train", str(job), "--rule", "1flb"],
        env=environment(ROUNDELAY_MALLOC="keep"),
        cwd=job.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 2, said.stderr
    assert "AssertionError" not in said.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_a_choice_that_contradicts_a_plan_is_told_before_the_job_is_run(capsys: Capture, job: Path) -> None:
    place = bench("mlp")
    text = roundelay.plan(place.job(), captured=place.captured, cuts="equal", workers=2, rule="pipeoptim").text()
    (job.parent / "run").mkdir()
    (job.parent / "run" / "plan.toml").write_text(text)
    for options, words in {
        ("--plan", "run/plan.toml", "--rule", "1f1b"): ("--rule with --plan", "pipeoptim"),
        ("--from", "run", "--predictor", "partial"): ("predictor of the plan", "rule 'pipeoptim' predicts"),
        ("--from", "run", "--transport", "pigeon"): ("transport of the plan", "'pigeon'"),
    }.items():
        one_screen(here(capsys, "train", job, *options), *words)
        assert not (job.parent / "ran").exists()
    (job.parent / "run" / "plan.toml").write_text(text.replace('backward = "stash"', 'backward = "stosh"'))
    one_screen(here(capsys, "train", job, "--plan", "run/plan.toml"), "backward of the plan", "Did you mean stash?")
    assert not (job.parent / "ran").exists()


OWN_RULE = """
import roundelay

roundelay.register_rule(roundelay.UpdateRule(
    name="cdp-v3", schedule="async-1f1b", predicts=False, stashes=True, modes=("stash",), source="mine",
    versions="table", fresh=test_early_checks_fresh,
))
"""


def test_a_rule_that_the_job_registers_is_waited_for(
    capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "_RULES", dict(rule._RULES))  # what the job registers is forgotten after the test
    before = "def test_early_checks_fresh(i, j, d):\n    return False\n" + OWN_RULE
    (workplace / "rules_of_mine.py").write_text(before)
    (workplace / "job.py").write_text("import mlp\nimport rules_of_mine\n\ndef job(seed):\n    return mlp.make()\n")
    assert here(capsys, "plan", workplace / "job.py", "--rule", "cdp-v3", "--cuts", "equal").code == 0
    said = here(capsys, "train", workplace / "job.py", "--rule", "cdp-v3", "--backward", "mixed")
    one_screen(said, "backward of the plan", "rule 'cdp-v3' allows these")
    one_screen(here(capsys, "train", workplace / "job.py", "--rule", "cdp-v33"), "the update rule", "'cdp-v33'")


@pytest.mark.parametrize(
    ("text", "others", "may"),
    [
        ("import torch, json, roundelay\n", {}, False),
        ("import roundelay\nroundelay.register_rule(None)\n", {}, True),
        ("def job(seed):\n    from mine import rule\n", {"mine.py": "from roundelay import register_rule\n"}, True),
        ("import mine\n", {"mine.py": "import more\n", "more.py": "x = 1\n"}, False),
        ("import mine\n", {"mine/__init__.py": "", "mine/rules.py": "roundelay.register_rule\n"}, True),
        ("import nowhere_to_be_found\n", {}, True),
        ("import importlib\nimportlib.import_module('mine')\n", {}, True),
        ("def job(:\n", {}, False),
    ],
)
def test_whether_a_job_may_register_rules_is_read_from_its_text(
    workplace: Path, text: str, others: dict[str, str], may: bool
) -> None:
    for name, content in {"job.py": text, **others}.items():
        (workplace / name).parent.mkdir(exist_ok=True)
        (workplace / name).write_text(content)
    assert may_register_rules(workplace / "job.py") == may


class Untouched:
    """A job of which nothing may be read."""

    ema = None

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of the job was read")


@pytest.mark.parametrize("function", [roundelay.plan, roundelay.train, roundelay.verify])
@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"rule": "1flb"}, "Did you mean 1f1b"),
        ({"layout": "dp", "rule": "async"}, "with layout dp"),
        ({"clip": "global:1", "rule": "async"}, "never flushes"),
        ({"devices": "cuda:9999"}, "no such device here"),
        ({"transport": "memry"}, "Did you mean memory"),
    ],
)
def test_functions_check_choices_before_capture(function: object, choices: dict[str, str], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        function(Untouched(), **choices)  # type: ignore[operator]


@pytest.mark.parametrize("given", [{}, {"devices": "cuda"}, {"devices": "cuda:0,cuda:1"}, {"transport": "nccl"}])
def test_devices_that_are_here_are_allowed(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_here(Choices(**given))
    with pytest.raises(PlanError, match="cuda:2: no such device here"):
        check_here(Choices(**given | {"devices": "cuda:0,cuda:2"}))


def test_functions_check_lengths_and_comparisons_before_capture(tmp_path: Path) -> None:
    for function in (roundelay.train, roundelay.verify):
        with pytest.raises(UsageError, match="at least 1"):
            function(Untouched(), steps=0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="Did you mean memory"):
        roundelay.compare(lambda seed: Untouched(), out=tmp_path, transport="memry")  # type: ignore[arg-type, return-value]


def test_more_threads_than_cores_are_told_of_when_they_are_asked_for(capsys: Capture) -> None:
    plan = ("plan", MLP, "--workers", "2", "--cuts", "equal", "--threads")
    told = here(capsys, *plan, "2").told
    assert "the plan has 4 threads on 2 cores here, where they wait for one another." in told
    assert "on 2 cores here" not in here(capsys, *plan, "1").told
