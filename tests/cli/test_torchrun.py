"""Under torchrun every process is one worker; together they compute what one host alone would; one of them leads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.stored_files import is_checkpoint
from roundelay.cli import launched_choices, plan_from_options
from roundelay.cli.plan_from_options import PlanSource, plan_job
from roundelay.errors import CheckpointError
from roundelay.observe.metrics_file import read_metrics
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.plan_options import Choices
from tests.cli.harness import MLP, environment, here, job_file, one_screen
from tests.cli.jobs import mlp

Capture = pytest.CaptureFixture[str]
END_S = 100.0
SOON_S = 25.0  # ten, had a test the machine to itself; without a mend of ours torch's launcher waits for 30
SLOW = """
import pathlib, time
def slow(epoch):
    for number, batch in enumerate(mlp.batches(epoch)):
        time.sleep(0.05)
        while (epoch, number) >= (1, 5) and pathlib.Path("hold").exists():
            time.sleep(0.01)
        yield batch
"""
LAUNCHED = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "test",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def torchrun(
    folder: Path, launcher: list[str], *args: object, command: str = "train", **env: str
) -> subprocess.Popen[str]:
    """Start the launcher in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "roundelay", command, *map(str, args)],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """No member of the group outlives the block."""
    try:
        yield
    finally:
        for pid in pids_of("-m roundelay", process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def pids_of(words: str, launcher: subprocess.Popen[str]) -> list[int]:
    """Children of the launcher whose command line holds ``words``, the oldest first."""
    path = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    children = path.read_text().split() if path.exists() else []
    found = []
    for child in children:
        with contextlib.suppress(OSError):
            if words in Path(f"/proc/{child}/cmdline").read_text().replace("\0", " "):
                found.append(int(child))
    return sorted(found)


def test_two_launched_processes_compute_what_one_host_alone_does(
    capsys: Capture, workplace: Path, tmp_path: Path
) -> None:
    plan = workplace / "plan.toml"
    assert here(capsys, "plan", MLP, "--workers", 2, "--transport", "gloo", "-o", plan).code == 0
    run = ("--steps", 20, "--no-baseline", "--plan", plan)
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "2"], MLP, *run, "--out", "launched")
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    assert out.count("loss ") == 1, "one of them shows the result"
    assert here(capsys, "train", MLP, *run, "--out", workplace / "alone").code == 0
    same_end(workplace / "launched", workplace / "alone")


def test_launched_processes_measure_a_profile_that_one_of_them_writes(workplace: Path) -> None:
    launcher = ["--standalone", "--nproc-per-node", "2"]
    process = torchrun(workplace, launcher, "--seconds", 0, "-o", "machine.toml", command="calibrate")
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    assert out.count("Wrote machine.toml") == 1, "one of them leads"
    profile = MachineProfile.parse((workplace / "machine.toml").read_text())
    assert (profile.transport, profile.workers, profile.hosts) == ("gloo", 2, 1)
    assert {row.kind for row in profile.links} == {
        "message",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }


def same_end(one: Path, other: Path) -> None:
    """The checkpoints of two runs hold the same bits."""
    ours, theirs = load(one / "checkpoint"), load(other / "checkpoint")
    assert ours.position == theirs.position
    for name, weight in theirs.parameters.items():
        assert torch.equal(weight, ours.parameters[name]), name
        for key, value in theirs.optimizer.get(name, {}).items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours.optimizer[name][key])), (name, key)


def test_the_launcher_restarts_a_killed_worker_and_the_run_goes_on_from_its_checkpoint(workplace: Path) -> None:
    job = job_file(workplace, "batches=slow", SLOW)
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    (hold := workplace / "hold").touch()
    process = torchrun(workplace, launcher, job, "--rule", "pipeoptim", "--epochs", 8, "--no-baseline", "--out", "run")
    metrics = workplace / "run" / "metrics.jsonl"
    with ending(process):
        deadline = time.monotonic() + END_S
        while not is_checkpoint(workplace / "run" / "checkpoint"):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(pids_of("roundelay train", process)[1], signal.SIGKILL)
        hold.unlink()
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    assert "worker 1" in out
    assert "lost" in out or "broke" in out, out
    updates = [line["update"] for line in read_metrics(metrics)]
    assert updates == list(range(len(updates)))
    assert load(workplace / "run" / "checkpoint").position.epoch == 8


@pytest.mark.timeout(400)  # starts the command twice and once more: minutes on a busy machine
def test_a_run_that_the_launcher_restarts_goes_on_in_mid_flight_by_its_plan(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "batches=slow", SLOW)
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    run = ("--rule", "pipeoptim", "--epochs", 3, "--no-baseline", "--checkpoint-every", 2)
    (hold := workplace / "hold").touch()
    process = torchrun(workplace, launcher, job, *run, "--out", "launched")
    launched = workplace / "launched"
    metrics = launched / "metrics.jsonl"
    with ending(process):
        deadline = time.monotonic() + END_S
        while not within_second_epoch(launched):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(pids_of("roundelay train", process)[0], signal.SIGKILL)
        hold.unlink()
        left, before = load(launched / "checkpoint"), read_metrics(metrics)
        assert left.flight is not None
        out, _ = process.communicate(timeout=2 * END_S)
    assert process.returncode == 0, out
    assert "dropped" not in out
    after = read_metrics(metrics)
    assert after[: left.position.updates] == before[: left.position.updates], "none is made twice"
    assert here(capsys, "train", job, *run, "--plan", launched / "plan.toml", "--out", workplace / "alone").code == 0
    alone = read_metrics(workplace / "alone" / "metrics.jsonl")
    assert [line["loss"] for line in after] == [line["loss"] for line in alone]
    same_end(launched, workplace / "alone")


BY_CHANCE = """
from roundelay.proof import run_vs_reference
run_vs_reference.uses_device = lambda devices: True

def by_chance(outputs, batch):
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError("by_chance does not have a deterministic implementation")
    return mlp.loss(outputs, batch)
"""


def test_a_launched_run_is_proved(workplace: Path) -> None:
    """The leader alone prints. What it finds to have no deterministic form no process asks torch for."""
    job = job_file(workplace, "loss=by_chance", BY_CHANCE)
    launcher = ["--standalone", "--nproc-per-node", "2"]
    process = torchrun(workplace, launcher, job, "--rule", "1f1b", "--json", command="verify")
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out
    (result,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert result["equal"]
    assert result["proved"]
    assert result["fidelity"]["exact"]
    assert result["nondeterministic"].startswith("by_chance")
    assert len({worker["pid"] for worker in result["workers"]}) == 2


@pytest.mark.parametrize("cuts", [None, "equal"])
def test_a_run_that_a_launcher_restarts_is_not_planned_anew(
    cuts: str | None, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again the stages might be cut elsewhere, and what is in flight in the checkpoint be dropped."""
    choices = Choices(workers=2, cuts=cuts)
    job = mlp.make()
    (workplace / "plan.toml").write_text(plan_job(job, choices, 0, PlanSource(), quiet=True).plan.text())
    monkeypatch.setattr(plan_from_options, "plan_with_reasons", None)  # whoever plans, fails
    again = plan_job(job, choices, 0, PlanSource(restarted=workplace), quiet=True).plan
    assert again.text() == (workplace / "plan.toml").read_text()
    with pytest.raises(TypeError):
        plan_job(job, choices, 0, PlanSource(restarted=workplace / "elsewhere"), quiet=True)


def within_second_epoch(run: Path) -> bool:
    """Whether the run has left a checkpoint amid its second epoch of six updates."""
    with contextlib.suppress(CheckpointError, FileNotFoundError):  # there is none yet
        return 6 < load(run / "checkpoint").position.updates < 12
    return False


@contextlib.contextmanager
def in_training(
    workplace: Path, changed: str = "batches=slow", prelude: str = SLOW
) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A launched run that takes minutes, and its processes by number, when it has made an update."""
    job = job_file(workplace, changed, prelude)
    launcher = ["--standalone", "--nproc-per-node", "2"]
    process = torchrun(workplace, launcher, job, "--epochs", 1000, "--no-baseline", "--out", "run")
    metrics = workplace / "run" / "metrics.jsonl"
    with ending(process):
        deadline = time.monotonic() + END_S
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = {}
        for pid in pids_of("roundelay train", process):
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            ranks[next(v.removeprefix("RANK=") for v in variables if v.startswith("RANK="))] = pid
        yield process, ranks


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_member_that_is_stopped_does_not_hold_up_the_others(workplace: Path, rank: str) -> None:
    """The launcher alone would wait for 30 seconds more."""
    with in_training(workplace) as (process, ranks):
        os.kill(ranks[rank], signal.SIGSTOP)
        out, _ = process.communicate(timeout=SOON_S)
        assert process.returncode == 1
        assert one_cause(out).startswith(f"worker {rank} of the launcher's got its connection broke")
        assert out.count(f"worker {rank} (process {ranks[rank]}) was stopped by a signal") == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_a_member_that_is_killed_another_tells(workplace: Path, rank: str) -> None:
    """Of the leader, too, who otherwise tells everything."""
    with in_training(workplace) as (process, ranks):
        os.kill(ranks[rank], signal.SIGKILL)
        out, _ = process.communicate(timeout=SOON_S)
        assert process.returncode == 1
        assert one_cause(out).startswith(f"worker {rank} of the launcher's got its connection broke")


LOADS = """
import time
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6400
    def __getitem__(self, index):
        time.sleep(0.01 if index < 320 else 100)
        return {"x": torch.full((6,), float(index % 7)), "y": torch.tensor(index % 3)}
def loaded(epoch):
    return torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=1)
"""


def test_what_a_killed_member_had_forked_ends_with_it(workplace: Path) -> None:
    """A loader's process holds the member's connections, and may hang. The first stage's worker has one."""
    with in_training(workplace, "batches=loaded", LOADS) as (process, ranks):
        running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        forked = [pid for pid in running if _group(pid) == ranks["0"] != pid]
        assert forked, "a loader's process"
        os.kill(ranks["0"], signal.SIGKILL)
        out, _ = process.communicate(timeout=SOON_S)
        assert process.returncode == 1
        assert one_cause(out).startswith("worker 0 of the launcher's got its connection broke")
        deadline = time.monotonic() + 2.0  # torch's own watchdog looks every five seconds
        while any(Path(f"/proc/{pid}").exists() for pid in forked):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_end_that_is_asked_for_is_told_once(workplace: Path, number: signal.Signals) -> None:
    """By the leader. The launcher sends each process a signal; a scheduler signals the launcher."""
    with in_training(workplace) as (process, _):
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, _ = process.communicate(timeout=SOON_S)
        assert process.returncode != 0
        assert out.count("Interrupted.") == 1
        assert "of the launcher's" not in out
        assert "╭" not in out.split("Interrupted.")[1]


WAITS = {
    "a member for the plan": """
import os, time
open("here" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "0":
    time.sleep(60)
""",
    "the leader for a member": """
import os, time
open("here" + os.environ["RANK"], "w").close()
from roundelay.launching.rendezvous import LaunchedGroup
if os.environ["RANK"] == "1":
    ProcessGroup.control_channel = lambda *args: time.sleep(60)
""",
}


@pytest.mark.parametrize("who", WAITS)
def test_who_waits_for_another_ends_with_the_launcher(workplace: Path, who: str) -> None:
    """The launcher's signal is heard while torch waits; else the launcher would wait for 30 seconds more."""
    job = job_file(workplace, "", WAITS[who])
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "2"], job, "--no-baseline", "--steps", 3)
    with ending(process):
        deadline = time.monotonic() + END_S
        while len(members := pids_of("roundelay train", process)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while not all((workplace / f"here{rank}").exists() for rank in "01") or not all(map(_rests, members)):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=SOON_S)
        assert out.count("Interrupted.") == 1
        assert "terminate called" not in out


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_member_that_is_stopped_before_all_have_met_does_not_hold_up_the_others(workplace: Path, rank: str) -> None:
    """In its own job file, where it reads data, for one."""
    stops = f"""
import os, signal
if os.environ["RANK"] == "{rank}":
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    job = job_file(workplace, "", stops)
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "2"], job, "--no-baseline", "--steps", 3)
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
        assert process.returncode == 1
        assert out.count(f"worker {rank} (process ") == 1
        assert "was stopped by a signal and not continued for 3 s, so it was ended" in out
        assert "╭" not in out.split("Traceback")[0]


HOLDS = """
import ctypes
def holds(epoch):
    if epoch == 1:
        ctypes.PyDLL(None).sleep(12)
    yield from mlp.batches(epoch)
"""


def test_a_leader_whose_interpreter_is_held_is_not_given_up(workplace: Path) -> None:
    """By a library that reads a large file, for one: no thread of its process runs, but the system answers."""
    job = job_file(workplace, "batches=holds", HOLDS)
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "2"], job, "--no-baseline", "--epochs", 2)
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 0, out


@pytest.mark.parametrize(
    ("prelude", "args", "words"),
    [
        ("raise ZeroDivisionError('a deliberate mistake')", (), "a deliberate mistake"),
        ("import os; assert os.environ['RANK'] != '1', 'no data here'", (), "no data here"),
        ("import os; assert os.environ['RANK'] != '0', 'no data here'", (), "no data here"),
        ("", ("--rule", "none"), "none"),
        ("", ("--transport", "memory"), "--transport under a launcher"),
        ("", ("--steps", 3, "--epochs", 3), "--epochs"),
        ("", ("--from", "nowhere"), "nowhere"),
        ("", ("--steps", "three"), "--steps"),
        ("", ("--layout", "dp", "--rule", "cdp-v1", "--micro-batches", 2), "expected  3: the launcher has started 3"),
        ("", ("--layout", "single", "--rule", "cdp-v1"), "the processes that the launcher has started"),
    ],
    ids=[
        *("the job", "a member's job", "the leader's job", "rule", "transport", "lengths", "checkpoint", "a word"),
        *("micro-batches", "one worker"),
    ],
)
def test_what_is_wrong_before_all_have_met_is_reported_by_every_process_that_finds_it(
    workplace: Path, prelude: str, args: tuple[object, ...], words: str
) -> None:
    job = job_file(workplace, "", prelude)
    process = torchrun(workplace, ["--standalone", "--nproc-per-node", "3"], job, "--no-baseline", *args)
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
    assert process.returncode == 1
    reported = re.findall("╭.*?╰|^Error: .*?$", out, re.DOTALL | re.MULTILINE)
    assert 1 <= len(reported) <= 3, out
    assert words in reported[0]


def _group(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


def _rests(pid: int) -> bool:
    before = _cpu_s(pid)
    time.sleep(1.0)
    return _cpu_s(pid) - before < 0.1


def _cpu_s(pid: int) -> float:
    """CPU time of a process, as the system counts it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


FAILS = """
import atexit, os, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 3)

def wrong(outputs, batch):
    if os.path.exists("evaluates"):
        raise ZeroDivisionError("a deliberate mistake")
    return mlp.loss(outputs, batch)

def slow(model):
    open("evaluates", "w").close()
    time.sleep(10)
    return {}
"""


def test_a_cause_is_told_though_the_launcher_ends_the_leader_while_it_leaves(workplace: Path) -> None:
    """The leader gives its evaluation three seconds; the member has told its error and ends amid them."""
    job = job_file(workplace, "loss=wrong, evaluate=slow", FAILS)
    process = torchrun(
        workplace, ["--standalone", "--nproc-per-node", "2"], job, "--epochs", 1000, "--no-baseline", "--out", "run"
    )
    with ending(process):
        out, _ = process.communicate(timeout=END_S)
        assert "a deliberate mistake" in one_cause(out)


def one_cause(said: str) -> str:
    """The one screen of Roundelay's own that tells what ended a run, up to what was expected."""
    screens = [" ".join(part.split("╰")[0].replace("│", " ").split()) for part in said.split("╭")[1:]]
    told = [screen.partition("─╮ ")[2].partition(" expected ")[0] for screen in screens if " got " in screen]
    assert len(told) == 1, said
    assert "Interrupted." not in said
    return told[0]


def test_members_do_not_outlive_a_launcher_that_is_killed(workplace: Path) -> None:
    with in_training(workplace) as (process, ranks):
        assert sorted(ranks) == ["0", "1"]
        process.kill()
        process.wait(END_S)
        deadline = time.monotonic() + 10.0
        while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("train", MLP, "--workers", 3), ("--workers", "3", "2 processes")),
        (("train", MLP, "--transport", "memory"), ("--transport", "memory", "gloo")),
        (("train", MLP, "--restarts", 1), ("--restarts", "the launcher restarts")),
        (("plan", MLP), ("roundelay plan", "launcher")),
        (("compare", MLP), ("roundelay compare", "launcher", "only `train`, `verify` and `calibrate`")),
        (("verify", MLP, "--workers", 3), ("--workers", "3", "2 processes")),
        (("calibrate", "--workers", 3), ("--workers", "3", "2 processes")),
        (("calibrate", "--transport", "shm"), ("--transport", "shm", "gloo")),
    ],
)
def test_what_makes_no_sense_under_a_launcher_is_refused(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], words: tuple[str, ...]
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    one_screen(here(capsys, *command), *words)


@pytest.mark.parametrize(
    ("command", "level"),
    [
        (("train", MLP, "--transport", "memory"), "0"),
        (("train", MLP, "--steps", "x"), "0"),
        (("plan", MLP), "0"),
        (("train", MLP), "much"),
    ],
)
def test_every_process_that_finds_a_mistake_reports_it(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...], level: str
) -> None:
    """A launcher ends all as soon as one has ended: if one of them were silent, the message could be lost."""
    monkeypatch.setenv("ROUNDELAY_DEBUG", level)
    for name, value in (LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    one_screen(here(capsys, *command))


ON_ITS_WAY = """
import time
from roundelay.cli import app
def building(**_):
    print("on its way", flush=True)
    time.sleep(60)
app.app = building
app.main()
"""


@pytest.mark.parametrize(
    ("env", "number", "code", "told"),
    [
        (LAUNCHED, signal.SIGTERM, -signal.SIGTERM, False),
        (LAUNCHED, signal.SIGINT, 130, True),
        ({}, signal.SIGTERM, 143, True),
        ({}, signal.SIGINT, 130, True),
    ],
)
def test_who_has_found_no_party_yet_says_nothing_of_a_launchers_signal(
    env: dict[str, str], number: signal.Signals, code: int, told: bool
) -> None:
    """It comes because of another that has told something already. Ctrl-C is the person's."""
    process = subprocess.Popen(
        [sys.executable, "-c", ON_ITS_WAY],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with ending(process):
        assert process.stdout is not None
        assert process.stdout.readline() == "on its way\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=SOON_S)
    assert process.returncode == code
    assert said.startswith("Interrupted.") if told else said == ""


@pytest.mark.parametrize(
    ("devices_here", "said", "transport"),
    [
        (0, {}, "gloo"),
        (1, {}, "gloo"),
        (2, {}, "nccl"),
        (2, {"devices": "cpu"}, "gloo"),
        (0, {"devices": "cuda"}, "nccl"),
        (2, {"transport": "gloo"}, "gloo"),
        (0, {"transport": "nccl"}, "nccl"),
    ],
)
def test_processes_with_a_device_each_talk_over_nccl(
    monkeypatch: pytest.MonkeyPatch, devices_here: int, said: dict[str, str], transport: str
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices_here)
    monkeypatch.setattr(launched_choices, "LaunchedGroup", lambda place: None)
    choices = Choices(**said)
    assert launched_choices.joined(choices, 0)[1].transport == transport


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"GROUP_WORLD_SIZE": "2"}, ("GLOO_SOCKET_IFNAME", "loopback")),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False", "RANK": "1"}, ("meeting worker 0 at 127.0.0.1:1",)),
        ({"WORLD_SIZE": "two"}, ("variables", "torchrun")),
        ({}, ("the launcher's store at 127.0.0.1:1",)),
    ],
)
def test_a_launcher_that_cannot_be_used_is_told(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("roundelay.launching.rendezvous_store.MEET_S", 0.5)
    monkeypatch.setattr("roundelay.launching.rendezvous_store.OPENED_S", 0.5)
    for name, value in (LAUNCHED | change).items():
        monkeypatch.setenv(name, value)
    one_screen(here(capsys, "train", MLP), *words)
