"""What a stage reports of its actions: every letter once, digests where they are due, and nothing late."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from roundelay.observe.action_trace import EVERY
from roundelay.observe.digest import digest
from roundelay.runtime import action_recorder
from roundelay.runtime.action_recorder import ActionRecorder
from roundelay.runtime.processes.worker_messages import Report


@dataclass
class Recorded:
    """A recorder of a stage whose state is one number, with what it has reported."""

    state: dict[str, Any] = field(default_factory=lambda: {"w": torch.zeros(1)})
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        stage = SimpleNamespace(spec=SimpleNamespace(stage=4), state_tensors=lambda: self.state)
        self.recorder = ActionRecorder(2, cast("Any", stage), self.reports.append)

    @property
    def letters(self) -> str:
        """All that were reported."""
        return "".join(report.data["letters"] for report in self.reports)

    @property
    def digests(self) -> list[list[object]]:
        """Likewise."""
        return [own for report in self.reports for own in report.data["digests"]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """With a clock that stands still."""
    monkeypatch.setattr(action_recorder.time, "monotonic", lambda: 100.0)
    return Recorded()


def test_forwards_and_backwards_are_letters_and_the_rest_belongs_to_them(recorded: Recorded) -> None:
    for opcode in ("read", "forward", "backward", "update", "forward", "backward", "update"):
        recorded.recorder.begin(opcode)
    assert recorded.reports == []
    recorded.recorder.end()
    assert recorded.letters == "FBFB"
    assert [report.data["ended"] for report in recorded.reports] == [False, True]
    assert {(report.kind, report.worker, report.data["stage"]) for report in recorded.reports} == {("letters", 2, 4)}
    assert recorded.digests == [[4, digest(recorded.state)]]


def test_a_digest_is_of_the_state_before_the_next_letter(recorded: Recorded) -> None:
    """So what follows on the letter, as an update does on its backward, is in it."""
    for number in range(EVERY):
        recorded.recorder.begin("forward" if number % 2 else "backward")
    assert recorded.reports == []
    recorded.state["w"] += 1
    recorded.recorder.begin("forward")
    assert recorded.digests == [[EVERY, digest({"w": torch.ones(1)})]]
    assert len(recorded.letters) == EVERY
    for _ in range(EVERY):
        recorded.recorder.begin("forward")
    assert [count for count, _ in recorded.digests] == [EVERY, 2 * EVERY]


def test_where_a_digest_is_there_it_is_not_repeated(recorded: Recorded) -> None:
    for _ in range(EVERY):
        recorded.recorder.begin("forward")
    recorded.recorder.take_digest()
    recorded.recorder.take_digest()
    recorded.recorder.begin("forward")
    recorded.recorder.take_digest()
    recorded.recorder.end()
    assert [count for count, _ in recorded.digests] == [EVERY, EVERY + 1]
    assert recorded.letters == "F" * (EVERY + 1)


def test_letters_do_not_wait_longer_than_a_second(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.recorder.begin("forward")
    monkeypatch.setattr(action_recorder.time, "monotonic", lambda: 101.5)
    recorded.recorder.begin("backward")
    assert (recorded.letters, recorded.digests) == ("F", [])
    recorded.recorder.begin("forward")
    assert recorded.letters == "F"
    recorded.recorder.end()
    assert recorded.letters == "FBF"


def test_a_stage_that_has_done_nothing_ends_too(recorded: Recorded) -> None:
    recorded.recorder.end()
    assert [report.data["ended"] for report in recorded.reports] == [True]
    assert (recorded.letters, recorded.digests) == ("", [])
