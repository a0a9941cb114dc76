"""What a run does to its device: reads that the host waits for, kernels that overlap, memory over many runs."""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import roundelay
from benchmarks.gpu.first_look import networks, told
from benchmarks.gpu.first_look.place import Place
from roundelay.session.training import Length, Session

SOURCE = str(Path(roundelay.__file__).parent)
RULES = (("1f1b", 4), ("pipeoptim", 1))

MOST_READS = 1.05
"""Host reads for a micro-batch."""

GROWTH, SLACK_MIB = 2.0, 64.0
"""How much more may be allocated after the last run than after the second: times (on a device), and so many MiB."""

A_WORKERS_PART = 0.1
"""Share of all operators that makes a thread of a rehearsal a worker's. Times are not judged on a busy CPU."""

Span = tuple[float, float, int]
"""Start and end in microseconds, and the stream (on the CPU the thread)."""


def _session(place: Place, rule: str, micro_batches: int, steps: int, captured: Any = None) -> Session:
    job = networks.endless(networks.made("attention", place.tiny))
    captured = captured or roundelay.capture(job)
    chosen = roundelay.plan(
        job, captured=captured, workers=2, rule=rule, micro_batches=micro_batches, devices=place.names(2)
    )
    return Session(job, captured, chosen, 0, Length(steps=steps))


@contextmanager
def _counting(place: Place) -> Iterator[Counter[str]]:
    """Count the reads that the host waits for, by the lines that make them."""
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def note(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if "synchroniz" in str(message):
            with lock:
                counted[_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if place.cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counted
        finally:
            if place.cuda:
                torch.cuda.set_sync_debug_mode("default")


def _line() -> str:
    """The innermost two lines of the product on the stack."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE):
            line = f"{name[len(SOURCE) + 1 :]}:{frame.f_lineno}"
            found += [line] if line not in found else []
        frame = frame.f_back
    return " < ".join(found) or "elsewhere"


def host_reads(place: Place) -> None:
    """Reads that the host waits for, per micro-batch in the steady state: those of a longer run less a shorter's."""
    few, many = (4, 8) if place.tiny else (12, 28)
    for rule, micro_batches in RULES:
        with told.part(rule):
            counts = []
            for steps in (few, many):
                session = _session(place, rule, micro_batches, steps)
                with _counting(place) as counted:
                    session.run(notify=lambda event: None)
                    place.wait()
                counts.append(counted)
            steady = counts[1] - counts[0]
            each = sum(steady.values()) / ((many - few) * micro_batches)
            told.figure(rule, round(each, 3), "reads per micro-batch")
            told.figure(f"{rule}, start and end", sum(counts[0].values()) - each * few * micro_batches, "reads")
            if lines := "; ".join(f"{count} × {line}" for line, count in steady.most_common(5)):
                told.note(f"{rule}, of {many - few} updates: {lines}")
            told.bar(each <= MOST_READS, f"{rule} {each:.2f} reads per micro-batch")


def shares(spans: Sequence[Span]) -> tuple[float, float, float]:
    """Shares of the time in which no stream works, one does, and several do."""
    ends = sorted([(start, 1, of) for start, _, of in spans] + [(end, -1, of) for _, end, of in spans])
    live: Counter[int] = Counter()
    busy, last, times = 0, ends[0][0], [0.0, 0.0, 0.0]
    for at, step, of in ends:
        times[min(busy, 2)] += at - last
        before, live[of], last = live[of], live[of] + step, at
        busy += (live[of] > 0) - (before > 0)
    whole = sum(times) or 1.0
    return times[0] / whole, times[1] / whole, times[2] / whole


def _spans(place: Place, session: Session) -> list[Span]:
    """What the device did, by stream, in a run under the profiler; on the CPU what every thread did."""
    if place.cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            session.run(notify=lambda event: None)
            place.wait()
    else:
        everyone = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everyone) as seen:
            session.run(notify=lambda event: None)
    spans = []
    for event in seen.events() or []:
        if not _is_work(place, event):
            continue
        stream = getattr(event, "device_resource_id", 0) if place.cuda else event.thread
        spans.append((event.time_range.start, event.time_range.end, int(stream)))
    return spans


def _is_work(place: Place, event: Any) -> bool:
    """Whether an event of the profiler is a kernel; on the CPU an operator."""
    on_device = str(event.device_type).endswith("CUDA")
    if not place.cuda:
        return not on_device and event.name.startswith("aten::")
    return on_device and not getattr(event, "is_user_annotation", False) and not event.name.startswith("Mem")


def overlap(place: Place) -> None:
    """Two workers on one device: shares of the time in which kernels overlap, and in which the device is idle."""
    if place.cuda and ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        told.skipped("this build of torch cannot trace CUDA")
        return
    warnings.filterwarnings("ignore")
    steps = 6 if place.tiny else 30
    for rule, micro_batches in RULES:
        with told.part(rule):
            session = _session(place, rule, micro_batches, steps)
            spans = _spans(place, session)
            if not spans:
                told.fails(f"{rule}: the profiler saw nothing")
                continue
            idle, one, several = shares(spans)
            told.figure(f"{rule} overlap", round(several, 4), "of the time")
            told.figure(f"{rule} idle", round(idle, 4), "of the time")
            told.figure(f"{rule} one stream", round(one, 4), "of the time")
            told.figure(f"{rule} kernels", round(len(spans) / steps, 1), "per update")
            told.figure(f"{rule} mean kernel", round(sum(b - a for a, b, _ in spans) / len(spans), 2), "µs")
            least = 0.0 if place.cuda else A_WORKERS_PART
            at_work = sum(count > least * len(spans) for count in Counter(of for *_, of in spans).values())
            holds = at_work >= 2 and (several > 0 or not place.cuda)
            told.bar(holds, f"{rule}: work on {at_work} streams, {several:.1%} at once")


def memory_over_runs(place: Place) -> None:
    """Memory after runs 1, 2, 10 and 20 of one process, and in the end after a collection of garbage."""
    warnings.filterwarnings("ignore")
    runs = 5 if place.tiny else 20
    shown = {1, 2, runs // 2, runs}
    allocated: dict[int, float] = {}
    for number in range(1, runs + 1):
        told.begins(f"run {number}")
        job = networks.made("cnn", place.tiny)
        chosen = roundelay.plan(job, workers=2, rule="pipeoptim", devices=place.names(2))
        roundelay.train(job, plan=chosen, steps=4, check="off")
        del job, chosen
        if number not in shown:
            continue
        place.wait()
        allocated[number] = place.allocated()
        told.figure(f"allocated after run {number}", round(allocated[number], 1), "MiB")
        told.figure(f"reserved after run {number}", round(place.reserved(), 1), "MiB")
    place.collect()
    told.figure("allocated in the end, collected", round(place.allocated(), 1), "MiB")
    told.figure("reserved in the end, collected", round(place.reserved(), 1), "MiB")
    most = allocated[2] * (GROWTH if place.cuda else 1.0) + SLACK_MIB
    told.bar(allocated[runs] <= most, f"{allocated[2]:.0f} MiB after run 2, {allocated[runs]:.0f} after run {runs}")
