"""Plain PyTorch beside the run: the same job, one process, the loop that everybody writes.

Measured in a forked child, so that neither its threads nor its memory touch the run.
"""

from __future__ import annotations

import copy
import json
import os
import select
import signal
import statistics
import time
from dataclasses import dataclass

import torch

from roundelay.frontend.batch import fresh, num_rows
from roundelay.frontend.face import default_inputs
from roundelay.frontend.loss import checked
from roundelay.frontend.placed import CPU
from roundelay.frontend.precision import FULL, autocast
from roundelay.interrupts import Interrupts
from roundelay.job import Job
from roundelay.lower.refuse import HALF
from roundelay.runtime.mortal import fork
from roundelay.runtime.processes import END_S, Child
from roundelay.runtime.reader import Extent, read_batches

BUDGET_S = 6.0
"""Seconds that the measurement may take for each number of threads."""

LIMIT_S = 60.0
"""Seconds after which a child that has told nothing is ended: its loader hangs, or an update takes too long."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Samples per second of plain PyTorch with this many intra-op threads."""

    threads: int
    samples_per_second: float


def measure(job: Job, seed: int, threads: int, precision: str = FULL) -> Baseline | None:
    """Train a copy for a few seconds; None if it cannot be measured: it failed, or told nothing in :data:`LIMIT_S`.

    Args:
        job: the job; its model is not changed.
        seed: of the data.
        threads: intra-op threads.
        precision: in which it computes, as a plan says it.
    """

    def live() -> None:
        torch.set_num_threads(threads)
        os.write(writing, json.dumps(_samples_per_second(job, seed, precision)).encode())

    with Interrupts() as interrupts:
        reading, writing = os.pipe()
        try:
            try:
                child = fork(live)
            finally:
                os.close(writing)
            text = _told(reading, child, interrupts)
        finally:
            os.close(reading)
    rate = json.loads(text) if text else 0.0
    return Baseline(threads, rate) if rate else None


def _told(reading: int, child: int, interrupts: Interrupts) -> bytes:
    """What it says, if it does; it has ended then."""
    try:
        interrupts.open()
        poller = select.poll()  # select knows the first 1024 files only
        poller.register(reading, select.POLLIN)
        return os.read(reading, 4096) if poller.poll(1000 * LIMIT_S) else b""  # one number, told at once
    finally:
        interrupts.held = True
        os.kill(child, signal.SIGKILL)  # what its loader has started ends with it
        Child(0, child, reading).wait(END_S)


def _samples_per_second(job: Job, seed: int, precision: str) -> float:
    model = copy.deepcopy(job.model)
    if not model.training:  # else parts may be in eval mode on purpose, as capture has it
        model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    scaler = torch.amp.GradScaler("cpu", enabled=precision == HALF)
    how = job.inputs or default_inputs
    times: list[float] = []
    began = start = time.perf_counter()
    for loaded in read_batches(job.batches, seed, Extent(batches=200)):
        batch = fresh(loaded)  # a run gives each update a batch of its own, too
        args, kwargs = how(batch)
        with autocast(precision, CPU):
            loss, count = checked(job.loss(model(*args, **kwargs), batch))
        scaler.scale(loss if count is None else loss / count).backward()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        times.append((end - start) / num_rows(batch))  # what the loader takes included, as this loop waits for it
        start = end
        if end - began > BUDGET_S:
            break
    warm = times[2:] or times
    return 1.0 / statistics.median(warm) if warm else 0.0
