"""A machine is measured by real workers; what is refused; where the profile goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roundelay.calibration import calibrate, measuring
from roundelay.calibration.calibrate import measured, profile_of, sweep_with
from roundelay.calibration.sweep import BURSTS, PHASES, Sweep
from roundelay.cli import calibrate_command
from roundelay.errors import RoundelayError, UserCodeError
from roundelay.planner.machine_profile import MESSAGE, SHARED, MachineProfile
from roundelay.planning.machine_profiles import found_profile, keep_profile, machine_here, read_profile
from roundelay.runtime.shm_allreduce import shared_bytes
from tests.cli.harness import here, one_screen
from tests.conftest import nothing_left_behind

COSTS = {"instruction_s": 1e-5, "message_instruction_s": 2e-5, "segment_s": 3e-5, "box_s": 4e-5}
CLASSES = {
    "matmul",
    "matmul-thin",
    "attention",
    "elementwise",
    "transcendental",
    "normalization",
    "softmax",
    "embedding",
}
STEPS = {"adamw", "sgd", "copy"}


def tiny(workers: int, transport: str) -> Sweep:
    """Little to measure."""
    return Sweep(workers, transport, 1, 0.0, least=2, num_bytes=(256, 64 << 10), width=128, burst_s=0.01)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures little."""
    monkeypatch.setattr(calibrate_command, "sweep_with", lambda workers, transport, *_: tiny(workers, transport))
    monkeypatch.setattr(calibrate, "fixed_costs", lambda *_: COSTS)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_two_workers_measure_all_of_a_profile(transport: str) -> None:
    told: list[str] = []
    with nothing_left_behind():
        profile = measured(tiny(2, transport), told.append)
    assert MachineProfile.parse(profile.text()) == profile
    assert (profile.transport, profile.workers, profile.threads, profile.hosts) == (transport, 2, 1, 1)
    profile.check_machine(machine_here())
    kinds = {MESSAGE, *PHASES} - (set() if transport == "shm" else {SHARED})
    assert {(row.kind, row.group) for row in profile.links} == {(kind, 2) for kind in kinds}
    assert all(0 < row.cpu(64 << 10) < 1 and 0 < row.seconds(64 << 10) < 1 for row in profile.links)
    backs = {f"{kind}-backward" for kind in {*CLASSES, "call"}}
    assert {one.kind for one in profile.operators} == {*CLASSES, *STEPS, "call", *backs}
    assert all(0 < one.seconds(4096) < 1 for one in profile.operators)
    assert profile.operator_s("matmul", 2**31) > 100 * profile.operator_s("matmul", 0)
    assert profile.together.keys() == BURSTS.keys()
    assert all(times > 0 for times in profile.together.values())
    assert 0 < profile.instruction_s <= profile.message_instruction_s < 0.1
    assert 0 < profile.box_s < 0.1
    assert 0 <= profile.segment_s < 0.1
    assert len(told) == 3


def test_one_worker_measures_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "fixed_costs", lambda *_: COSTS)
    profile = measured(tiny(1, "memory"))
    assert profile.links == ()
    assert profile.operators


def test_groups_are_powers_of_two_and_all() -> None:
    sweep = tiny(6, "shm")
    links = [step for step in sweep.steps if step.what == "link"]
    assert {step.group for step in links if step.kind != MESSAGE} == {2, 4, 6}
    assert {step.kind for step in links} == {MESSAGE, *PHASES}
    assert {sweep.members(step) for step in links if step.kind == MESSAGE} == {(0, 5)}
    works = sweep.works()
    for number, step in enumerate(sweep.steps):
        members = {worker for worker in range(6) if number in works[worker].exchanges}
        assert members == (set(range(step.group)) if step.what == "link" and step.kind != MESSAGE else set())


def test_only_sums_of_weights_gradients_share_memory() -> None:
    sweep = tiny(4, "shm")
    own = {n: step for n, step in enumerate(sweep.steps) if step.kind == SHARED}
    assert shared_bytes(sweep.works()) == {n: (step.group + 1) * step.size for n, step in own.items()}


def test_each_worker_has_some_of_what_is_exchanged() -> None:
    for step in tiny(16, "memory").steps:
        if step.what == "link" and step.kind != MESSAGE:
            assert step.shape[0] >= step.group
            assert 4 * math.prod(step.shape) == step.size


def rows_of(sweep: Sweep) -> dict[int, dict[str, list[list[float]]]]:
    """Worker k takes s (k + 1) seconds for step s, and half of that in the second column, but in the first sweep."""

    def row(seconds: float) -> list[float]:
        return [seconds, seconds / 2]

    steps = range(len(sweep.steps))
    return {
        worker: {str(n): [row(99.0), *(row((n + 1) * (worker + 1) * times) for times in (1, 5, 1))] for n in steps}
        for worker in range(sweep.workers)
    }


def test_a_profile_has_means_of_workers_medians_without_the_first_sweep() -> None:
    sweep = tiny(2, "memory")
    profile = profile_of(sweep, rows_of(sweep), COSTS, hosts=3)
    numbers = {(step.what, step.kind, step.size): n + 1 for n, step in enumerate(sweep.steps)}
    message = numbers["link", MESSAGE, 256]
    assert profile.message_s(256) == pytest.approx(message * 1.5, rel=1e-3)
    assert profile.message_cpu_s(256) == pytest.approx(message * 0.75, rel=1e-3)
    gather = numbers["link", "all-gather", 64 << 10]
    assert profile.exchange_s(PHASES["all-gather"], 64 << 10, 2) == pytest.approx(gather * 1.5, rel=1e-3)
    assert profile.operator_s("call", 64) == pytest.approx(numbers["operator", "call", 64], rel=1e-3)
    assert profile.operator_s("call-backward", 64) == pytest.approx(numbers["operator", "call", 64] / 2, rel=1e-3)
    together, alone = numbers["together", "small", 64], numbers["alone", "small", 64]
    assert profile.together["small"] == pytest.approx(1.5 * together / alone, rel=1e-3)
    assert (profile.hosts, profile.box_s, profile.segment_s) == (3, 4e-5, 3e-5)


@pytest.mark.parametrize(
    ("workers", "transport", "threads", "seconds", "word"),
    [
        (0, "shm", 1, 1.0, "workers 0"),
        (2, "shm", 0, 1.0, "threads 0"),
        (2, "shm", 1, float("nan"), "seconds nan"),
        (2, "shm", 1, float("inf"), "seconds inf"),
        (2, "shm", 1, -1.0, "seconds -1"),
        (2, "nccl", 1, 1.0, "transport nccl"),
        (2, "pigeon", 1, 1.0, "pigeon"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    workers: int, transport: str, threads: int, seconds: float, word: str
) -> None:
    with pytest.raises(RoundelayError, match=word) as refused:
        sweep_with(workers, transport, threads, seconds)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_a_worker_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    def fail(self: Any, number: int, step: Any) -> Any:
        if self.worker == 1:
            raise OSError("no more")
        yield from ()

    monkeypatch.setattr(measuring._Worker, "make", fail)
    with nothing_left_behind(), pytest.raises(UserCodeError, match="no more"):
        measured(tiny(2, transport))


def test_the_command_keeps_a_profile_where_planning_finds_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, little: None
) -> None:
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path))
    said = here(capsys, "calibrate", "--workers", 2, "--threads", 1, "--seconds", 0, "--json")
    assert said.code == 0, said.err
    found = found_profile("memory", 2, 1)
    assert found is not None
    assert said.json["profile"] == json.loads(msgspec.json.encode(found))
    assert read_profile(Path(said.json["path"])) == found
    assert found_profile("shm", 2, 1) is found_profile("memory", 3, 1) is found_profile("memory", 2, 2) is None
    Path(said.json["path"]).write_text(found.text().replace(found.processor, "Another"))
    assert found_profile("memory", 2, 1) is None
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")
    assert keep_profile(found) is None


def test_the_command_writes_a_file_or_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, little: None
) -> None:
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")
    path = tmp_path / "machine.toml"
    said = here(capsys, "calibrate", "--threads", 1, "--seconds", 0, "-o", path)
    assert (said.code, said.out) == (0, "")
    assert "sweep 2" in said.err
    assert "Wrote" in said.err
    assert read_profile(path).workers == 2
    said = here(capsys, "calibrate", "--workers", 1, "--threads", 1, "--seconds", 0)
    assert MachineProfile.parse(said.out).workers == 1
    one_screen(here(capsys, "calibrate", "--transport", "nccl"), "nccl", "launcher")
    one_screen(
        here(capsys, "calibrate", "--seconds", 0, "--workers", 1, "-o", tmp_path / "no" / "x"), "writing", "no/x"
    )


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"[project]\n"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "machine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RoundelayError, match="profile") as refused:
        read_profile(path)
    assert refused.value.exit_code == 2
