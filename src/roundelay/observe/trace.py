"""Traces: who computed what and when, as a file for https://ui.perfetto.dev or chrome://tracing.

The format is Chrome's Trace Event Format, in its JSON object form: a process per worker, named after its stages; a
complete event (``X``) per instruction, and below them one per gap between instructions, called ``wait`` or ``bubble``;
where a worker reads, a thread beside it, ``reader``, with an event per batch that was loaded meanwhile; and arrows
(``s`` to ``f``) along which activations and gradients went. Times are microseconds. Every event is a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from roundelay.checkpoint.atomic_files import replacing_file
from roundelay.ir.micro_batch import Load
from roundelay.ir.program import OPCODES

_PASSED_ON = ("forward", "backward")
"""Opcodes whose results go to other stages: activations one on, gradients one back."""

_MICRO = 1e6
_READER = 1
"""Number of a reader's thread in its worker's process; that of the instructions is 0."""

SHORT_S = 5e-6
"""Gaps shorter than this many seconds are left out: nobody could see them."""


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction, as it was executed.

    Args:
        worker: k.
        opcode: ``forward``, ``backward``, ``backward-weight``, ``grad-norm-sq``, ``update`` or ``read``.
        g: global number of the micro-batch.
        batch: t, the number of its batch.
        version: version of the weights that it read.
        distance: updates that the prediction bridged; 0 without one.
        start_s: when it began, in seconds of a clock that all workers share.
        end_s: when it ended.
        num_bytes: bytes that it gave to other workers.
        stage: the stage that it acted on.
        of: the value that it boxed, if it is one.
        takes: channels that it took messages from.
        gives: channels that it gave messages to.
    """

    worker: int
    opcode: str
    g: int
    batch: int
    version: int
    distance: int
    start_s: float
    end_s: float
    num_bytes: int
    stage: int
    of: str = ""
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which a worker does nothing.

    Args:
        worker: which one.
        kind: ``bubble``, ``wait``, or ``idle`` where the two cannot be told apart.
        start_s: when it began.
        end_s: when it ended.
    """

    worker: int
    kind: Literal["bubble", "wait", "idle"]
    start_s: float
    end_s: float


def flows_of(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """The messages between neighbouring stages, each as the span that made it and the span that used it."""
    between = [span for span in spans if span.opcode in _PASSED_ON]
    takers = {(channel, span.opcode, span.g): span for span in between for channel in span.takes}
    found = [(span, takers.get((channel, span.opcode, span.g))) for span in between for channel in span.gives]
    return [(source, target) for source, target in found if target is not None]


def write_trace(
    path: Path,
    spans: Sequence[Span],
    *,
    gaps: Iterable[Gap] = (),
    loads: Sequence[Load] = (),
    names: Mapping[int, str] | None = None,
) -> None:
    """Write a trace, event by event; its time begins with the first span or load.

    Args:
        path: the file; an old one stays until the new one is complete.
        spans: in any order.
        gaps: what lies between the spans.
        loads: batches that readers loaded meanwhile.
        names: worker to what its stage computes, for the process's name.

    Raises:
        RunError: it cannot be written.
    """
    begin = min([*(span.start_s for span in spans), *(load.start_s for load in loads)], default=0.0)
    with replacing_file(path) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        heads = chain(_processes(spans, names or {}), _readers(loads))
        events = chain(heads, _events(spans, begin), _idle(gaps, begin), _loaded(loads, begin))
        file.write(next(events, ""))
        file.writelines(",\n" + event for event in events)
        file.write("\n]}\n")


def _events(spans: Sequence[Span], begin: float) -> Iterator[str]:
    """Each event as JSON. Written by hand: ``json.dumps`` takes several times as long, and only names need escapes."""
    titles = {opcode: OPCODES[opcode].letter for opcode in {span.opcode for span in spans}}
    categories = {opcode: json.dumps(opcode) for opcode in titles}
    for s in spans:
        number = s.batch if OPCODES[s.opcode].once_a_batch and not s.of else s.g
        of = f',"of":{json.dumps(s.of)}' if s.of else ""
        yield (
            f'{{"ph":"X","name":"{titles[s.opcode]} {number}","cat":{categories[s.opcode]},"pid":{s.worker},"tid":0,'
            f'"ts":{(s.start_s - begin) * _MICRO:.3f},"dur":{(s.end_s - s.start_s) * _MICRO:.3f},'
            f'"args":{{"stage":{s.stage},"micro-batch":{s.g},"batch":{s.batch},"version":{s.version},'
            f'"distance":{s.distance},"bytes":{s.num_bytes}{of}{_made(s)}}}}}'
        )
    for i, (source, target) in enumerate(flows_of(spans)):
        yield from _arrow(i, source, target, begin)


def _made(span: Span) -> str:
    """An update reads one version and makes the next."""
    return f',"makes version":{span.version + 1}' if span.opcode == "update" else ""


def _idle(gaps: Iterable[Gap], begin: float) -> Iterator[str]:
    for gap in gaps:
        if gap.end_s - gap.start_s >= SHORT_S:
            yield (
                f'{{"ph":"X","name":"{gap.kind}","cat":"idle","pid":{gap.worker},"tid":0,'
                f'"ts":{(gap.start_s - begin) * _MICRO:.3f},"dur":{(gap.end_s - gap.start_s) * _MICRO:.3f}}}'
            )


def _loaded(loads: Sequence[Load], begin: float) -> Iterator[str]:
    for load in loads:
        yield (
            f'{{"ph":"X","name":"load {load.batch}","cat":"load","pid":{load.worker},"tid":{_READER},'
            f'"ts":{(load.start_s - begin) * _MICRO:.3f},"dur":{(load.end_s - load.start_s) * _MICRO:.3f},'
            f'"args":{{"batch":{load.batch}}}}}'
        )


def _readers(loads: Sequence[Load]) -> Iterator[str]:
    for worker in sorted({load.worker for load in loads}):
        event = {"ph": "M", "name": "thread_name", "pid": worker, "tid": _READER, "args": {"name": "reader"}}
        yield json.dumps(event, separators=(",", ":"))


def _processes(spans: Sequence[Span], names: Mapping[int, str]) -> Iterator[str]:
    runs: dict[int, set[int]] = {}
    for span in spans:
        runs.setdefault(span.worker, set()).add(span.stage)
    for worker, stages in sorted(runs.items()):
        label = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, sorted(stages)))}"
        yield from _names(worker, ": ".join(filter(None, (label, names.get(worker, "")))))


def _names(worker: int, stages: str) -> Iterator[str]:
    labels = {
        "process_name": {"name": f"worker {worker} ({stages})"},
        "process_sort_index": {"sort_index": worker},
        "thread_name": {"name": "instructions"},
    }
    for name, args in labels.items():
        yield json.dumps({"ph": "M", "name": name, "pid": worker, "tid": 0, "args": args}, separators=(",", ":"))


def _arrow(number: int, source: Span, target: Span, begin: float) -> Iterator[str]:
    """Both ends lie inside their spans, since viewers tie an end to the event around it; ids tie them together."""
    shared = f'"id":{number},"name":{json.dumps(f"{source.opcode} {source.g}")},"cat":"flow","tid":0'
    leave, arrive = _within(source, 0.999) - begin, _within(target, 0.001) - begin
    yield f'{{"ph":"s",{shared},"pid":{source.worker},"ts":{leave * _MICRO:.3f}}}'
    yield f'{{"ph":"f","bp":"e",{shared},"pid":{target.worker},"ts":{arrive * _MICRO:.3f}}}'


def _within(span: Span, share: float) -> float:
    return span.start_s + (span.end_s - span.start_s) * share
