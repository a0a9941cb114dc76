"""What a machine that joined by an invitation reports is checked: whatever cannot be true loses it, by one error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.checkpoint.held_state import HeldState, encode
from roundelay.checkpoint.shards import Shard
from roundelay.errors import InternalError, RoundelayError, RunError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.launching import control_channel
from roundelay.launching.control_channel import ControlChannel, Others, messages_of
from roundelay.runtime.processes.worker_messages import Header, Report, error_of, failure
from roundelay.runtime.processes.worker_messages import encode as encode_report
from roundelay.runtime.report_data import KINDS, MOST_BYTES, check_data
from roundelay.session.run_record import RunRecord
from roundelay.session.state_gather import StateGatherer
from roundelay.transport.endpoint import Message
from roundelay.transport.memory import MemoryEndpoint, memory_endpoints

HEADER = MicroBatch(0, 0, 0, 1, 4, 4, 0, 0, 0).numbers()
SUMMARY = {
    **{"busy_s": 1.0, "wall_s": 1.0, "updates": 1, "skipped": 0, "first_event_g": 0},
    **{"bytes_sent": {"0": 1}, "bytes_received": {}, "start_sums": {}, "pid": 1},
}
GOOD: dict[str, dict[str, Any]] = {
    "loss": {"g": 0, "loss": 1.0, "count": 0.0, "header": HEADER},
    "progress": {"busy_s": 0.5, "wall_s": 1.0, "update": 1},
    "skipped": {"update": 0, "in_a_row": 1, "scale": 2.0},
    "events": {"events": [["forward", 0, 0, 0, 0, 0.0, 1.0, 4, 1, "", [0], [1], "F0"]]},
    "loads": {"loads": [[0, 0.0, 1.0]]},
    "digest": {"digests": [["forward", 1, 0, 0, "00ff"]]},
    "letters": {"stage": 1, "letters": "FB", "digests": [[2, "00ff"]], "ended": False},
    "finished": SUMMARY,
}
STRANGE: dict[str, tuple[str, dict[str, Any]]] = {
    "no data": ("loss", {}),
    "a header of one number": ("loss", GOOD["loss"] | {"header": [1]}),
    "words for numbers": ("progress", GOOD["progress"] | {"busy_s": "x"}),
    "another field": ("loads", {"loads": [], "run": "rm"}),
    "letters that are none": ("letters", GOOD["letters"] | {"letters": "F\nB"}),
    "a path for a digest": ("letters", GOOD["letters"] | {"digests": [[2, "../x"]]}),
    "an error that there is not": (
        "failed",
        failure(1, RunError("a", got="b", expected="c", remedy="d")).data | {"kind": "sys"},
    ),
    "half a summary": ("finished", {"busy_s": 1.0}),
    "bytes of a channel without a number": ("finished", SUMMARY | {"bytes_sent": {"x": 1}}),
    "a state without a header": ("state", {"stage": 1}),
    "an exit code of the host's": ("verdict", {"code": -1}),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_a_worker_reports_is_let_through(kind: str) -> None:
    check_data(Report(kind, 1, msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD[kind]))))  # type: ignore[arg-type]
    assert GOOD.keys() | {"state", "failed", "verdict"} == KINDS.keys()


@pytest.mark.parametrize("what", STRANGE)
def test_data_of_another_kind_are_refused(what: str) -> None:
    kind, data = STRANGE[what]
    with pytest.raises(ValueError):  # noqa: PT011
        check_data(Report(kind, 1, data))  # type: ignore[arg-type]


# --- on the control channel


@contextmanager
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryEndpoint, MemoryEndpoint, list[str]]]:
    """A leader's channel; the other's ends of reports and news, and what the leader hears."""
    monkeypatch.setattr(control_channel, "NEWS_S", 0.1)
    reports, news = memory_endpoints(2), memory_endpoints(2)
    heard: list[str] = []
    channel = ControlChannel(
        reports[0],
        news[0],
        (1,),
        lambda report: heard.append(report.kind),
        lambda rank, error: heard.append(f"{type(error).__name__} {error.subject}: {error.got}"),
        lambda error: heard.append(f"unreadable: {error}"),
        Others(most_bytes=1000),
    )
    try:
        yield reports[1], news[1], heard
    finally:
        channel.end("over")


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)


def message(header: bytes, *buffers: torch.Tensor) -> Message:
    return Message(0, (), (torch.frombuffer(bytearray(header), dtype=torch.uint8), *buffers))


def header_of(**changed: Any) -> bytes:
    fields = {"kind": "state", "worker": 1, "data": {}, "tensors": ()} | changed
    return msgspec.msgpack.encode([*fields.values()])


def of(kind: str, data: dict[str, Any]) -> Message:
    return next(messages_of(encode_report(Report(kind, 1, data))))  # type: ignore[arg-type]


GARBAGE: dict[str, Message] = {
    "no msgpack": message(b"\xc1" * 20),
    "no bytes": Message(0, (), (3,)),
    "nothing": Message(0, (), ()),
    "an unknown kind": message(header_of(kind="evil")),
    "another's name": message(header_of(worker=0)),
    "a tensor where none is due": message(header_of(kind="loss", tensors=[("x", "uint8", [4])])),
    "too large a tensor": message(header_of(tensors=[("x", "uint8", [2**30])])),
    "too many bytes in all": message(header_of(tensors=[(f"x{k}", "uint8", [400]) for k in range(3)])),
    "too long": message(bytes(MOST_BYTES + 1)),
    "nested without end": message(b"\x94\xa4loss\x01" + b"\x81\xa1x" * 5000),
    "more buffers than it says": message(header_of(), torch.zeros(3, dtype=torch.uint8)),
    **{what: of(*STRANGE[what]) for what in ("no data", "an error that there is not", "a state without a header")},
}


@pytest.mark.parametrize("by", ["reports", "news"])
@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_loses_its_sender_by_name_and_nobody_else(what: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch) as (reports, news, heard):
        (reports if by == "reports" else news).send(0, GARBAGE[what])
        until(lambda: heard)
        assert [text.partition(" of the")[0] for text in heard] == ["WorkerLostError worker 1"], heard
        assert "a report that cannot be true" in heard[0]


def test_what_comes_after_garbage_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(monkeypatch) as (reports, _, heard):
        reports.send(0, of("loss", GOOD["loss"]))
        reports.send(0, GARBAGE["no msgpack"])
        reports.send(0, of("loss", GOOD["loss"]))
        until(lambda: len(heard) == 2)
        time.sleep(0.2)
        assert heard[0] == "loss"
        assert len(heard) == 2


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text() | st.floats(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(lambda value: msgspec.msgpack.encode(_small(value)))
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_report_or_an_error_of_two_kinds(data: bytes) -> None:
    incoming = control_channel._Incoming(1, 1000)
    with suppress(ValueError, RuntimeError):
        incoming.report(message(data or b"\0"))


def _small(value: Any) -> Any:
    """Integers that msgpack can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value % 2**64
    if isinstance(value, list):
        return [_small(item) for item in value]
    return {key: _small(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_an_error_of_no_known_kind_is_a_bug_and_names_nothing_of_python() -> None:
    strange = failure(1, RunError("a", got="b", expected="c", remedy="d"))
    for kind in ("difflib", "Iterable", "_FEW", "os", "listed"):
        assert type(error_of(Report("failed", 1, strange.data | {"kind": kind}))) is InternalError
    assert type(error_of(strange)) is RunError


# --- in the record of the run


def record() -> RunRecord:
    return RunRecord(2, lambda event: None, lambda update: (0.1,))


IMPOSSIBLE = {
    "a far batch": ("loss", GOOD["loss"] | {"header": MicroBatch(0, 2**40, 0, 1, 4, 4, 0, 0, 0).numbers()}),
    "a batch that is over": ("loss", GOOD["loss"] | {"header": MicroBatch(0, -1, 0, 1, 4, 4, 0, 0, 0).numbers()}),
    "no rows": ("loss", GOOD["loss"] | {"header": MicroBatch(0, 0, 0, 1, 0, 4, 0, 0, 0).numbers()}),
    "more rows than there are": ("loss", GOOD["loss"] | {"header": MicroBatch(0, 0, 0, 1, 9, 4, 0, 0, 0).numbers()}),
    "letters of no stage": ("letters", GOOD["letters"] | {"stage": 77}),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_true_ends_the_run_by_the_worker_s_name(what: str) -> None:
    kind, data = IMPOSSIBLE[what]
    check_data(Report(kind, 1, data))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="worker 1: got a report of kind"):
        record().take(Report(kind, 1, data))  # type: ignore[arg-type]


def test_an_observer_s_own_error_is_not_laid_on_a_worker() -> None:
    def observe(event: object) -> None:
        raise KeyError("the person's own")

    with pytest.raises(KeyError, match="the person's own"):
        RunRecord(2, observe, lambda update: (0.1,)).take(Report("loss", 1, GOOD["loss"]))


# --- states


def state(g: int = 0, shape: tuple[int, ...] = (2, 3), worker: int = 1, **changed: Any) -> Report:
    tensor = torch.zeros(shape)
    held = HeldState(1, {"w": Shard(tuple((0, size) for size in shape), tensor)}, {}, {})
    table, tensors = encode(held)
    data = {"header": (g, *HEADER[1:]), "stage": 1, "table": msgspec.to_builtins(table), "gathered": True} | changed
    return Report("state", worker, data, tensors)


STORED = {"file": "../../etc/x", "sha256": "", "table": msgspec.to_builtins(encode(HeldState(1, {}, {}, {}))[0])}
STATES: dict[str, Report] = {
    "another shape": state(shape=(9, 9)),
    "a missing tensor": Report("state", 1, state().data, {}),
    "a file": state(stored=STORED),
    "no data": Report("state", 1, {}),
    "a short header": state(header=[1]),
}


def gatherer(holders: int = 2) -> StateGatherer:
    return StateGatherer(holders, {"w": (2, 3)}, lambda snapshot, parts: None, trusting=False)


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_cannot_be_is_refused_by_the_worker_s_name(what: str) -> None:
    with pytest.raises(RunError, match="worker 1: got a report of kind 'state'"):
        gatherer().take(STATES[what])


def test_states_of_versions_that_never_come_do_not_pile_up() -> None:
    taker = gatherer()
    for g in range(256):
        taker.take(state(g))
    with pytest.raises(RunError, match="stage 1 after micro-batch 256"):
        taker.take(state(256))
    again = gatherer()
    again.take(state())
    with pytest.raises(RoundelayError, match="stage 1 after micro-batch 0"):
        again.take(state())
    gatherer(1).take(state())


def test_a_header_is_what_is_checked() -> None:
    assert [*Header.__struct_fields__] == ["kind", "worker", "data", "tensors"]
