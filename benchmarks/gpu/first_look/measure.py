"""Measurements of speed and memory, which run alone: GPT-2, linear layers, a vision transformer, checkpoints."""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import roundelay
from benchmarks.gpu.first_look import networks, told
from benchmarks.gpu.first_look.place import Place
from roundelay import Job
from roundelay.session.events import Saved
from roundelay.session.training import Length, Session

SLOWEST = {False: 0.2, True: 0.04}
"""Our samples/s may be this part of plain PyTorch's, and no less; in a rehearsal (True) less."""

NEAR = {"fp32": 0.01, "bf16": 0.05}
"""How far the last loss may be from plain PyTorch's, as a part of it."""

LIKE_WHOLE = 0.85
"""The part of a whole batch's peak below which the peak of `--layout single` must be."""


@dataclass(frozen=True)
class Way:
    """A way to train: plain PyTorch if `workers` is 0, else ours."""

    workers: int
    rule: str = ""
    precision: str = "fp32"
    compiled: bool = False

    def __str__(self) -> str:
        who = "plain" if not self.workers else f"{self.workers} worker{'s' * (self.workers > 1)} {self.rule}"
        return f"{who} {self.precision}{' compiled' * self.compiled}"


@dataclass(frozen=True)
class Run:
    """What a training showed: samples per second, MiB at most, and its last loss."""

    samples_per_s: float
    peak_mib: float
    loss: float


class TooSlow(Exception):
    """Something took longer than it may."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what takes longer; in the main thread."""

    def end(number: int, frame: object) -> None:
        raise TooSlow(f"more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _parts(batch: Any, count: int) -> list[Any]:
    """The micro-batches of a batch."""
    leaves, spec = pytree.tree_flatten(batch)
    chunks = zip(*(leaf.chunk(count) for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(list(some), spec) for some in chunks]


def plain(place: Place, job: Job, parts: int, steps: int, way: Way) -> Run:
    """Train in plain PyTorch: gradients added up over the micro-batches, copies pinned, no loss read but the last."""
    place.collect()
    model = job.model.to(place.device).train()
    optimizer = job.optimizer(list(model.named_parameters()))
    called: Callable[..., Any] = torch.compile(model) if way.compiled else model
    data, start, rows, last = iter(job.batches(0)), 0.0, 0, torch.zeros(())
    place.reset_peak()
    first = max(2, steps // 4)
    for step in range(steps):
        if step == first:
            start = place.now()
        batch = pytree.tree_map(lambda tensor: tensor.pin_memory() if place.cuda else tensor, next(data))
        here = pytree.tree_map(lambda tensor: tensor.to(place.device, non_blocking=True), batch)
        rows = pytree.tree_leaves(here)[0].shape[0]
        last = torch.zeros((), device=place.device)
        for some in _parts(here, parts):
            args, kwargs = job.inputs(some) if job.inputs else (some[:-1], {})
            with torch.autocast(place.kind, torch.bfloat16, enabled=way.precision == "bf16"):
                loss = job.loss(called(*args, **kwargs), some) / parts
            loss.backward()
            last += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    seconds = place.now() - start
    return Run(rows * (steps - first) / seconds, place.peak(), last.item())


def ours(place: Place, job: Job, captured: Any, parts: int, steps: int, way: Way) -> Run:
    """Train by Roundelay, all workers on one device."""
    place.collect()
    began = place.now()
    chosen = roundelay.plan(
        job,
        captured=captured,
        workers=way.workers,
        rule=way.rule,
        micro_batches=parts,
        precision=way.precision,
        devices=place.names(way.workers),
    )
    told.figure(f"{way} planning", round(place.now() - began, 2), "s")
    place.collect()
    place.reset_peak()
    trained = Session(job, captured, chosen, 0, Length(steps=steps)).run(notify=lambda event: None)
    place.wait()
    return Run(trained.samples_per_second, place.peak(), trained.updates[-1].loss)


def _tell(way: Way, run: Run) -> None:
    told.figure(f"{way}", round(run.samples_per_s, 2), "samples/s")
    told.figure(f"{way} peak", round(run.peak_mib, 1), "MiB")
    told.figure(f"{way} loss", run.loss, "nats")


def _beside_plain(place: Place, make: Callable[[], Job], parts: int, steps: int, capture_s: float) -> None:
    """Plain PyTorch, then ours in several ways from one capture; ours must be near it in speed and loss."""
    warnings.filterwarnings("ignore")
    beside: dict[str, Run] = {}
    for precision in ("fp32",) if place.tiny else ("fp32", "bf16"):
        with told.part(f"plain {precision}"):
            way = Way(0, precision=precision)
            beside[precision] = plain(place, make(), parts, steps, way)
            _tell(way, beside[precision])
    job = make()
    first = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    captured = _captured(job, capture_s)
    if captured is None:
        return
    ways = [Way(1, "1f1b"), Way(2, "1f1b"), Way(2, "pipeoptim"), Way(1, "1f1b", "bf16"), Way(2, "1f1b", "bf16")]
    for way in ways[:3] if place.tiny else ways:
        with told.part(f"{way}"):
            job.model.load_state_dict(first)  # a run leaves its last weights there
            run = ours(place, job, captured, parts, steps, way)
            _tell(way, run)
            if way.precision in beside:
                _judge(place, way, run, beside[way.precision])


def _captured(job: Job, limit_s: float) -> Any:
    """The captured job; None if it took too long."""
    told.begins("capture")
    began = time.perf_counter()
    try:
        with within(limit_s):
            captured = roundelay.capture(job)
    except TooSlow as error:
        told.note(f"capture: {error}; ours is left out")
        return None
    told.figure("capture", round(time.perf_counter() - began, 2), "s")
    return captured


def _judge(place: Place, way: Way, run: Run, beside: Run) -> None:
    ratio = run.samples_per_s / beside.samples_per_s
    told.figure(f"{way} to plain", round(ratio, 3), "times")
    told.bar(ratio > SLOWEST[place.tiny], f"{way}: {ratio:.2f} times as fast as plain")
    if way.rule == "1f1b":  # computes what plain PyTorch does
        off = abs(run.loss - beside.loss) / abs(beside.loss)
        told.bar(off <= NEAR[way.precision], f"{way}: last loss {run.loss:.4f}, plain {beside.loss:.4f}")


def gpt_small(place: Place) -> None:
    """GPT-2 of six layers, 4 x 512, two micro-batches."""
    if place.tiny:
        _beside_plain(place, lambda: networks.gpt_job(1, 4, 32, 64, 100), 2, 5, 60.0)
    else:
        _beside_plain(place, lambda: networks.gpt_job(6, 4, 512), 2, 24, 60.0)


def gpt_full(place: Place) -> None:
    """GPT-2 of 124 million parameters, 8 x 1,024, four micro-batches."""
    if place.tiny:
        told.skipped("a rehearsal has the small one only")
        return
    _beside_plain(place, lambda: networks.gpt_job(12, 8, 1024), 4, 16, 180.0)


def gpt_compiled(place: Place) -> None:
    """The same in plain PyTorch with `torch.compile`."""
    if place.tiny:
        told.skipped("a rehearsal compiles nothing")
        return
    warnings.filterwarnings("ignore")
    for precision in ("fp32", "bf16"):
        way = Way(0, precision=precision, compiled=True)
        told.begins(str(way))
        torch.compiler.reset()
        began = time.perf_counter()
        try:
            _tell(way, plain(place, networks.gpt_job(12, 8, 1024), 4, 16, way))
        except Exception as error:  # without triton or a C compiler, which is no fault of ours
            told.skipped(f"{way}: {told.in_words(error)}")
        told.figure(f"{way} all", round(time.perf_counter() - began, 1), "s")


def wide(place: Place) -> None:
    """Twelve linear layers of 2,048, 2,048 rows in four micro-batches."""
    _beside_plain(place, lambda: _wide(place), 4, 5 if place.tiny else 40, 60.0)


def _wide(place: Place) -> Job:
    return networks.endless(networks.made("wide", place.tiny))


def layout_single(place: Place) -> None:
    """Peak memory of a vision transformer: a whole batch, gradient accumulation, and `--layout single`."""
    warnings.filterwarnings("ignore")
    rows, parts, steps = (32 if place.tiny else 16), 4, 3
    peaks = {}
    for name, count in (("whole batch", 1), ("accumulation", parts)):
        with told.part(name):
            before = _before(place)
            run = plain(place, networks.vision_job(place.tiny, rows), count, steps, Way(0))
            peaks[name] = run.peak_mib - before
            told.figure(name, round(peaks[name], 1), "MiB")
    with told.part("layout single"):
        job = networks.vision_job(place.tiny, rows)
        captured = _captured(job, 100.0)
        if captured is None:
            return
        chosen = roundelay.plan(
            job, captured=captured, layout="single", rule="cdp-v2", micro_batches=parts, devices=place.names(1)
        )
        before = _before(place)
        place.reset_peak()
        trained = Session(job, captured, chosen, 0, Length(steps=2 * steps)).run(notify=lambda event: None)
        place.wait()
        peak = place.peak() - before
        told.figure("layout single", round(peak, 1), "MiB")
        told.figure("layout single speed", round(trained.samples_per_second, 2), "samples/s")
        most = LIKE_WHOLE * peaks["whole batch"]
        told.bar(peak < most, f"layout single {peak:.0f} MiB, a whole batch {peaks['whole batch']:.0f} MiB")


def _before(place: Place) -> float:
    """MiB that are not the training's: on the CPU the whole process as it is."""
    place.collect()
    return 0.0 if place.cuda else place.allocated()


def checkpoint_stall(place: Place) -> None:
    """Median and worst update with and without a checkpoint at every eighth."""
    warnings.filterwarnings("ignore")
    steps = 24 if place.tiny else 48
    job = _wide(place)
    captured = roundelay.capture(job)
    for every in (None, 8):
        name = f"every {every}" if every else "without"
        with told.part(name), tempfile.TemporaryDirectory() as folder:
            chosen = roundelay.plan(job, captured=captured, workers=2, rule="pipeoptim", devices=place.names(2))
            saved: list[Saved] = []
            kept = Path(folder) / "checkpoint"
            trained = roundelay.train(
                job,
                plan=chosen,
                steps=steps,
                check="off",
                observers=[lambda event, saved=saved: saved.append(event) if isinstance(event, Saved) else None],
                **({"save_to": kept, "checkpoint_every": every} if every else {}),
            )
            seconds = [update.seconds for update in trained.updates][4:]
            each = [1e3 * (b - a) for a, b in pairwise(seconds)]
            told.figure(f"{name} median", round(statistics.median(each), 2), "ms")
            told.figure(f"{name} worst", round(max(each), 2), "ms")
            told.figure(f"{name} all", round(seconds[-1] - seconds[0], 3), "s")
            if every:
                size = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) / 2**20
                told.figure("checkpoint", round(size, 1), "MiB")
                told.figure("checkpoints", len(saved), "of them")
                told.bar(len(saved) > 0 and size > 0, f"{len(saved)} checkpoints written, the last of {size:.0f} MiB")
