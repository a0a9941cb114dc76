"""What a report may say that comes from a machine that joined by an invitation: types and sizes, kind by kind."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roundelay.errors import RunError
from roundelay.runtime.processes.worker_messages import ERRORS, Header, Report
from roundelay.runtime.state_reports import StateReport

MOST_BYTES = 2**23
"""Of a report without its tensors."""

MOST_TENSORS = 2**17

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Int = int
_Text = Annotated[str, Meta(max_length=2**16)]
_Letters = Annotated[str, Meta(pattern=r"\A[A-Z]*\Z", max_length=2**20)]
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,128}\Z")]
_Header = Annotated[tuple[_Int, ...], Meta(min_length=15, max_length=15)]
_Bytes = dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")], _Count]


class _Loss(msgspec.Struct, forbid_unknown_fields=True):
    g: _Count
    loss: float
    count: float
    header: _Header
    lacking: float = 0.0
    scale: float = 1.0
    metrics: dict[str, tuple[float, float]] = {}


class _Progress(msgspec.Struct, forbid_unknown_fields=True):
    busy_s: float
    wall_s: float
    update: _Count


class _Skipped(msgspec.Struct, forbid_unknown_fields=True):
    update: _Count
    in_a_row: _Count
    scale: float


_Event = tuple[
    _Text, _Int, _Int, _Int, _Int, float, float, _Count, _Count, _Text, tuple[_Count, ...], tuple[_Count, ...], _Text
]


class _Events(msgspec.Struct, forbid_unknown_fields=True):
    events: list[_Event]


class _Loads(msgspec.Struct, forbid_unknown_fields=True):
    loads: list[tuple[_Count, float, float]]


class _Digests(msgspec.Struct, forbid_unknown_fields=True):
    digests: list[tuple[_Text, _Count, _Count, _Int, _Digest]]


class _TracedLetters(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Count
    letters: _Letters
    digests: list[tuple[_Count, _Digest]]
    ended: bool


class _Failed(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    subject: _Text
    got: _Text
    expected: _Text
    remedy: _Text
    trace: str

    def __post_init__(self) -> None:
        if self.kind not in ERRORS:
            raise ValueError("an error that there is not")


class _Verdict(msgspec.Struct, forbid_unknown_fields=True):
    code: Annotated[int, Meta(ge=0, le=255)]


class _Finished(msgspec.Struct):
    """The numbers that are added up; others are shown."""

    busy_s: float
    wall_s: float
    updates: _Count
    skipped: _Count
    first_event_g: _Int
    bytes_sent: _Bytes
    bytes_received: _Bytes
    start_sums: Any = None


KINDS: dict[str, type[msgspec.Struct]] = {
    "loss": _Loss,
    "progress": _Progress,
    "skipped": _Skipped,
    "events": _Events,
    "loads": _Loads,
    "digest": _Digests,
    "letters": _TracedLetters,
    "state": StateReport,
    "failed": _Failed,
    "finished": _Finished,
    "verdict": _Verdict,
}
"""What the data of each kind of report must be."""


def check_header(header: Header, source: int, most_bytes: int) -> None:
    """Refuse a report before memory is taken for its tensors.

    Args:
        header: as it came.
        source: the worker whose connection it came over.
        most_bytes: that all of its tensors may have.

    Raises:
        ValueError: it is under another's name, or too much.
    """
    if header.worker != source:
        raise ValueError(f"a report under the name of worker {header.worker}")
    if len(header.tensors) > (MOST_TENSORS if header.kind == "state" else 0) or sum(header.sizes()) > most_bytes:
        raise ValueError(f"a report of kind {header.kind!r} with more tensors than there can be")


def check_data(report: Report) -> None:
    """Refuse a report whose data are not those of its kind.

    Raises:
        ValueError: they are not.
    """
    msgspec.convert(report.data, KINDS[report.kind])


def misreported(report: Report, error: Exception | str) -> RunError:
    """The error for a report that cannot be true; it ends the run, and names its worker."""
    got = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return RunError(
        f"worker {report.worker}",
        got=f"a report of kind {report.kind!r} that cannot be true ({got})",
        expected="what this worker computes by the plan",
        remedy="Ask whoever runs that machine; `--from` the last checkpoint goes on, without it if need be.",
    )
