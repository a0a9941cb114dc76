"""What a machine says as it ends is what the others tell of it, and with which error they end."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.deferred_signals import EndedAsAsked
from roundelay.detect_launcher import LEADER
from roundelay.errors import PeerLostError, RoundelayError, RunError, WorkerLostError
from roundelay.launching.last_words import MOST_CHARACTERS, end_told, loss_told, lost_words
from roundelay.launching.peer_group import Guard, PeerGroup, Place


class NoTexts:
    """No machine leaves a text."""

    def put(self, name: str, text: str) -> None:
        raise AssertionError(name)

    def get(self, name: str, deadline_s: float) -> str:
        raise AssertionError(name)


def machine(rank: int) -> PeerGroup:
    """One of three."""
    nobody: Any = None
    return PeerGroup(
        Place(rank, ("worker-0", "worker-1", "worker-2"), nobody, 0, 0, 0, 0), NoTexts(), Guard(nobody, nobody)
    )


def heard(cause: BaseException | None) -> RoundelayError:
    """What a machine that has joined makes of how the host ends."""
    return machine(1).loss(LEADER, machine(LEADER).last_words(cause))


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        (PeerLostError.of("worker-2", "connection reset"), ("worker-2", "connection reset")),
        (
            RunError("batches", got="ValueError: no\nrow", expected="", remedy=""),
            ("host", "batches: ValueError: no row"),
        ),
        (KeyboardInterrupt(), ("host", "it was interrupted")),
        (SystemExit(3), ("host", "it has failed")),
        (None, ("host", "it has failed")),
    ],
    ids=["a machine", "an error", "Ctrl-C", "anything", "nothing known"],
)
def test_why_the_host_ends_is_told_by_all(cause: BaseException | None, told: tuple[str, str]) -> None:
    lost = heard(cause)
    assert isinstance(lost, PeerLostError)
    assert (lost.subject, lost.got) == told
    with pytest.raises(PeerLostError):
        machine(1).without_leader(lost)


def test_an_end_in_good_order_is_no_loss() -> None:
    one = machine(1)
    assert one.without_leader(heard(EndedAsAsked("saved after update 30"))) == 0
    assert one.farewell == "saved after update 30"


def test_a_host_that_says_nothing_is_lost_itself() -> None:
    lost = machine(1).loss(LEADER, "connection reset")
    assert (lost.subject, lost.got) == ("host", "connection reset")


@pytest.mark.parametrize("number", [LEADER, 1])
def test_only_the_host_speaks_for_others(number: int) -> None:
    lost = machine(2 - number).loss(2, lost_words("worker-1", "it left"))
    assert (lost.subject, lost.got) == ("worker-2", "lost: worker-1: it left")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RunError("stage 2", got="out of memory", expected="", remedy=""), ("worker-2", "stage 2: out of memory")),
        (WorkerLostError("worker 1", got="it left", expected="", remedy=""), ("worker-1", "it left")),
        (WorkerLostError("worker 9", got="it left", expected="", remedy=""), ("worker-2", "worker 9: it left")),
        (PeerLostError.of("worker-1", "it left"), ("worker-1", "it left")),
    ],
    ids=["its own", "a neighbour", "nobody", "told already"],
)
def test_what_a_machine_reports_before_it_ends_is_told_under_the_name_of_who_is_lost(
    error: RoundelayError, told: tuple[str, str]
) -> None:
    lost = machine(LEADER).attributed(2, error)
    assert isinstance(lost, PeerLostError)
    assert (lost.subject, lost.got) == told


def test_what_fails_on_the_host_is_its_own_error_there() -> None:
    error = RunError("batches", got="no row", expected="", remedy="")
    assert machine(LEADER).attributed(LEADER, error) is error


def test_words_are_one_line_that_is_not_too_long() -> None:
    told = loss_told(lost_words("worker-2", "a\x1b[2J\r\nb " + "x" * 10**6))
    assert told is not None
    assert told[0] == "worker-2"
    assert told[1].startswith("a [2J b x")
    assert len(told[1]) <= MOST_CHARACTERS
    assert (loss_told("worker-2: it left"), loss_told("lost: no colon"), end_told("lost: a: b")) == (None, None, None)
