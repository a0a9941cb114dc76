"""What a run without an order writes down, and `verify --trace`, which replays it: equal, broken, refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roundelay.cli.plan_from_options import PlanSource, plan_job
from roundelay.ir.plan import Plan
from roundelay.observe.arithmetic import arithmetic
from roundelay.observe.run_folder import RunFolder
from roundelay.planner.plan_options import Choices
from roundelay.planning.job_file import load_job
from roundelay.proof.tamper import tampered_handlers
from roundelay.session.checkpointing import Saving
from roundelay.session.event_writers import RunFolderObserver
from roundelay.session.stop_condition import Length
from roundelay.session.trace_files import read_traces
from tests.cli.harness import JOBS, MLP, here, job_file, one_screen, start
from tests.cli.test_interrupts import until
from tests.resume.cuts import every_checkpoint

Capture = pytest.CaptureFixture[str]
STEPS = 150
STAGES = 3
FREE = ("--rule", "ravnest", "--workers", STAGES, "--transport", "shm", "--no-baseline")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run; beside it `all`, with a checkpoint of every epoch."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(JOBS)
        planned = plan_job(load_job(Path(MLP), 0), chosen(), 0, PlanSource(), quiet=True)
        with every_checkpoint(patch, folder / "all"):
            record(planned.plan, folder / "run", STEPS, {})
        yield folder / "run"


def chosen() -> Choices:
    """The choices of :data:`FREE`."""
    return Choices(rule="ravnest", workers=STAGES, transport="shm")


def record(plan: Plan, path: Path, steps: int, tampered: dict[int, str]) -> None:
    """Run the small network by a plan, a way to tamper at some stages, and write down what it does."""
    folder = RunFolder.create(path.parent, path.name, point=False)
    folder.write_plan(plan.text())
    planned = plan_job(load_job(Path(MLP), 0), Choices(), 0, PlanSource(folder.plan), quiet=True)
    session = planned.session(0, Length(steps=steps), None)
    handlers = {stage: tampered_handlers(way, plan, stage) for stage, way in tampered.items()}
    with folder.open_metrics() as metrics:
        saving = Saving(path=folder.checkpoint)
        session.run(notify=RunFolderObserver(folder, metrics, 0), handlers=handlers, saving=saving)


def copied(run: Path) -> Path:
    """A copy of a run, to be changed."""
    return Path(shutil.copytree(run, "copy"))


def edit(run: Path, stage: int, change: Callable[[str], str]) -> str:
    """Change a trace; what it was."""
    path = run / "trace" / f"stage-{stage}.txt"
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before
    return before


def digests(run: Path) -> int:
    """How many digests."""
    return sum(len(trace.digests) for trace in read_traces(run / "trace", STAGES))


def differs(capsys: Capture, run: Path, job: object = MLP) -> tuple[int, int]:
    """Assert that a run is told to differ from its replay; at which letter of which stage."""
    said = here(capsys, "verify", job, "--trace", run)
    assert said.code == 1, said.err
    assert "trace != replay: " in said.out
    found = re.search(r"replay DIFFERS at letter (\d+) of stage (\d+)", said.out)
    assert found is not None, said.out
    shown = here(capsys, "verify", job, "--trace", run, "--json")
    assert shown.code == 1
    assert (shown.json["equal"], shown.json["difference"].startswith(found.group())) == (False, True)
    return int(found.group(1)), int(found.group(2))


# --- equal


def test_train_writes_what_each_stage_did_and_verify_replays_it(capsys: Capture) -> None:
    said = here(capsys, "train", MLP, *FREE, "--steps", 9, "--out", "R")
    assert said.code == 0, said.err
    assert sorted(path.name for path in Path("R/trace").iterdir()) == [f"stage-{k}.txt" for k in range(STAGES)]
    said = here(capsys, "verify", MLP, "--trace", "R")
    assert said.code == 0, said.err
    assert said.out.strip() == f"trace = replay: bit-equal: {6 * 9} letters, 0 of {digests(Path('R'))} digests differ"
    assert said.err.strip() == ""


def test_the_whole_of_a_run_is_one_object_of_json(capsys: Capture, recorded: Path) -> None:
    said = here(capsys, "verify", MLP, "--trace", recorded, "--json")
    assert said.code == 0, said.err
    assert said.json == {
        "equal": True,
        "difference": "",
        "ended": True,
        "rule": "ravnest",
        "letters": 2 * STAGES * STEPS,
        "digests": digests(recorded),
        "digests_that_differ": 0,
    }
    assert digests(recorded) >= STAGES * STEPS // 6


def test_a_window_has_so_many_letters_of_each_stage(capsys: Capture, recorded: Path) -> None:
    said = here(capsys, "verify", MLP, "--trace", recorded, "--window", 40)
    assert said.code == 0, said.err
    found = re.fullmatch(r"trace = replay: bit-equal: (\d+) letters, 0 of (\d+) digests differ", said.out.strip())
    assert found is not None, said.out
    traces = read_traces(recorded / "trace", STAGES)
    assert int(found[2]) <= sum(count <= 40 for trace in traces for count in trace.digests)
    assert STAGES * 30 < int(found[1]) <= STAGES * 40


def test_a_window_from_a_checkpoint_begins_with_what_was_in_flight(capsys: Capture, recorded: Path) -> None:
    """Also by name of a run's folder, whose checkpoint it is."""
    checkpoint = recorded.parent / "all" / "60"
    said = here(capsys, "verify", MLP, "--trace", recorded, "--from", checkpoint, "--window", 300, "--json")
    assert said.code == 0, said.err
    assert said.json["equal"]
    assert 2 * STAGES * (STEPS - 60) <= said.json["letters"] <= 2 * STAGES * (STEPS - 60) + 8
    assert said.json["digests"] >= STAGES * (STEPS - 60) // 6
    assert here(capsys, "verify", MLP, "--trace", recorded, "--from", checkpoint, "--window", 30).code == 0
    whole = copied(recorded)
    shutil.rmtree(whole / "checkpoint")
    shutil.copytree(checkpoint, whole / "checkpoint")
    assert here(capsys, "verify", MLP, "--trace", recorded, "--from", whole, "--json").json == said.json


def test_a_run_that_was_killed_is_replayed_as_far_as_it_goes(capsys: Capture, workplace: Path) -> None:
    process = start(workplace, "train", MLP, *FREE, "--steps", 999_999, "--out", "R")
    try:
        traces = [workplace / "R" / "trace" / f"stage-{k}.txt" for k in range(STAGES)]
        until(lambda: all(path.exists() and path.read_text().count("=") > 2 for path in traces), process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    said = here(capsys, "verify", MLP, "--trace", "R")
    assert said.code == 0, said.err
    assert "trace = replay: bit-equal" in said.out
    assert "The run was broken off" in said.told
    found = re.search(r"bit-equal: ([\d,]+) letters", said.out)
    assert found is not None
    left = read_traces(Path("R/trace"), STAGES)
    assert not any(trace.ended for trace in left)
    assert 0 < int(found[1].replace(",", "")) <= sum(len(trace.letters) for trace in left)


def test_the_forwards_in_flight_of_a_run_that_was_killed_are_replayed_too(capsys: Capture, recorded: Path) -> None:
    """Their data are read, though the stage never came to their backwards."""
    run, (trace, *_) = copied(recorded), read_traces(recorded / "trace", STAGES)
    count = next(n for n in trace.digests if trace.letters.count("F", 0, n) > trace.letters.count("B", 0, n))
    end = f"= {count} {trace.digests[count]}\n"
    edit(run, 0, lambda text: text[: text.index(end)] + end)
    for stage in (1, 2):
        edit(run, stage, lambda text: re.sub("(?m)^= .*\n", "", text))
    found = here(capsys, "verify", MLP, "--trace", run, "--json")
    assert (found.code, found.json["equal"], found.json["ended"]) == (0, True, False)
    assert found.json["digests"] == sum(n <= count for n in trace.digests)


def test_a_run_that_was_continued_is_replayed_from_its_checkpoint(capsys: Capture, recorded: Path) -> None:
    """In mid-flight, into a folder of its own: forwards in flight are done again, and are letters of both traces."""
    checkpoint = recorded.parent / "all" / "60"
    planned = ("--plan", recorded / "plan.toml", "--steps", 9)
    said = here(capsys, "train", MLP, "--from", checkpoint, *planned, "--no-baseline", "--out", "R")
    assert said.code == 0, said.err
    assert [path.name for path in Path("R").iterdir() if path.name.startswith("trace-")] == ["trace-from-60"]
    found = here(capsys, "verify", MLP, "--trace", "R", "--from", checkpoint, "--json")
    assert (found.code, found.json["equal"], found.json["ended"]) == (0, True, True)
    assert found.json["letters"] == 2 * STAGES * 9
    refused(capsys, MLP, "--trace", "R", words=("run R", "trace-from-60", "Add --from CHECKPOINT"))


# --- broken


def test_two_letters_that_changed_places(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    edit(run, 0, lambda text: re.sub("(?<=[FB])FB(?=[FB])", "BF", text, count=1))
    letter, stage = differs(capsys, run)
    assert letter in read_traces(recorded / "trace", STAGES)[stage].digests


def test_a_letter_that_nothing_allows_is_told_though_no_digest_was_compared(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    edit(run, 2, lambda text: text.replace("\nFB", "\nBF", 1))
    assert differs(capsys, run) == (0, 2)
    said = here(capsys, "verify", MLP, "--trace", run, "--window", 60)
    assert (said.code, "replay DIFFERS at letter 0 of stage 2" in said.out) == (1, True)


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("way", ["drop-update", "stash"])
def test_an_update_that_was_lost_and_weights_that_were_stale(
    capsys: Capture, recorded: Path, way: str, stage: int
) -> None:
    record(Plan.parse((recorded / "plan.toml").read_text()), Path("R"), 8, {stage: way})
    letter, _ = differs(capsys, Path("R"))
    assert letter > 0


FOREIGN = """
def foreign(epoch):
    for number, batch in enumerate(mlp.batches(epoch)):
        yield {**batch, "x": batch["x"] + 0.125} if (epoch, number) == (1, 2) else batch
"""


def test_a_batch_of_other_data(capsys: Capture, recorded: Path) -> None:
    letter, stage = differs(capsys, recorded, job_file(Path(), "batches=foreign", FOREIGN))
    before = read_traces(recorded / "trace", STAGES)[stage].letters[:letter]
    assert before.count("F") > 8, "the ninth batch is another"
    assert before.count("B") <= 12, "the end of its epoch"


def test_another_seed(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    for stage in range(STAGES):
        edit(run, stage, lambda text: text.replace("\nseed 0\n", "\nseed 1\n", 1))
    differs(capsys, run)


# --- refused


def refused(capsys: Capture, *arguments: object, words: tuple[str, ...]) -> None:
    """Assert that a command is refused in one readable screen."""
    said = here(capsys, "verify", *arguments)
    assert said.code == 2, said.out + said.err
    one_screen(said, *words)


def test_another_arithmetic(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    for stage in range(STAGES):
        edit(run, stage, lambda text: re.sub("(?m)^arithmetic .*$", "arithmetic 0123456789abcdef", text))
    refused(capsys, MLP, "--trace", run, words=("the arithmetic of this machine", "0123456789abcdef", arithmetic()))


def test_a_plan_that_was_edited(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    text = (run / "plan.toml").read_text()
    (run / "plan.toml").write_text(re.sub("(?m)^in_flight = .*$", "in_flight = 9", text, count=1))
    assert (run / "plan.toml").read_text() != text
    refused(capsys, MLP, "--trace", run, words=("the plan of the run", "Give the run unchanged"))


@pytest.mark.parametrize("damage", ["missing", "letter", "digest", "head", "bytes", "stage", "seed"])
def test_a_trace_that_is_missing_damaged_or_of_another_run(capsys: Capture, recorded: Path, damage: str) -> None:
    run = copied(recorded)
    path = run / "trace" / "stage-1.txt"
    text = path.read_text()
    changed = {
        "letter": re.sub("(?m)^F", "X", text, count=1),
        "digest": re.sub("(?m)^= ", "= 1", text, count=1),
        "head": text.replace("roundelay action trace 1", "roundelay action trace 2"),
        "stage": text.replace("stage 1 of 3", "stage 0 of 3"),
        "seed": text.replace("seed 0", "seed 1"),
    }
    if damage == "missing":
        path.unlink()
    elif damage == "bytes":
        path.write_bytes(b"\x80" + text.encode())
    else:
        path.write_text(changed[damage])
        assert changed[damage] != text
    refused(capsys, MLP, "--trace", run, words=("stage-1.txt", "unchanged"))


def test_another_model(capsys: Capture, recorded: Path) -> None:
    job = job_file(Path(), "model=torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))")
    refused(capsys, job, "--trace", recorded, words=("model",))


@pytest.mark.parametrize(
    "option",
    [("--steps", 8), ("--epochs", 1), ("--seed", 3), ("--tamper", "rng"), ("--rule", "ravnest"), ("--plan", "p.toml")],
    ids=lambda option: option[0],
)
def test_what_the_run_says_is_not_given_again(capsys: Capture, recorded: Path, option: tuple[str, object]) -> None:
    refused(capsys, MLP, "--trace", recorded, *option, words=(f"{option[0]} with --trace", f"Leave {option[0]} out"))


def test_a_window_of_no_trace_and_one_without_a_digest(capsys: Capture, recorded: Path) -> None:
    refused(capsys, MLP, "--window", 9, words=("--window", "no --trace"))
    refused(capsys, MLP, "--trace", recorded, "--window", 3, words=("the window of 3 letters", "a larger --window"))


def test_a_run_that_was_broken_off_before_its_first_digest(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    for stage in range(STAGES):
        edit(run, stage, lambda text: text[: text.index("= ")])
    refused(capsys, MLP, "--trace", run, words=("no digest among them", "broken off too early"))


def test_a_checkpoint_of_another_run(capsys: Capture, recorded: Path) -> None:
    run = copied(recorded)
    for stage in range(STAGES):
        edit(run, stage, lambda text: text[: text.index("= ")])
    checkpoint = recorded.parent / "all" / "60"
    refused(capsys, MLP, "--trace", run, "--from", checkpoint, words=("the checkpoint after update 60",))


def test_a_run_whose_order_was_planned_has_no_trace(capsys: Capture) -> None:
    said = here(capsys, "train", MLP, "--workers", 2, "--rule", "1f1b", "--no-baseline", "--steps", 2, "--out", "R")
    assert said.code == 0, said.err
    assert not Path("R/trace").exists()
    refused(capsys, MLP, "--trace", "R", words=("trace R/trace/stage-0.txt", "--rule ravnest"))
    refused(capsys, MLP, "--trace", "none", words=("none",))
