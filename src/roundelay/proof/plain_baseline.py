"""The speed of plain PyTorch for comparison: the same job in one process, by the usual training loop.

Measured in a forked child process, so that its threads and its memory do not affect the run.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch

from roundelay.errors import RoundelayError
from roundelay.frontend.batch import fresh, num_rows
from roundelay.frontend.export.export_adapter import default_inputs
from roundelay.frontend.loss import checked
from roundelay.frontend.stages.precision import FULL, autocast
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.job import Job
from roundelay.launching.forked_call import isolated
from roundelay.lower.validate_plan import HALF
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.loader_epoch import forget

BUDGET_S = 6.0
"""Seconds that the measurement may take for each number of threads."""

LIMIT_S = 60.0
"""Seconds after which the child is ended if it has not finished: its loader hangs, or an update takes too long."""


def measure(job: Job, seed: int, threads: int, precision: str = FULL) -> float | None:
    """Samples per second of a copy of the model, trained for a few seconds; None if that fails or exceeds LIMIT_S.

    Args:
        job: the job; its model is not changed.
        seed: of the data.
        threads: intra-op threads.
        precision: as in a plan.
    """
    try:
        rate: float = isolated(
            lambda: _samples_per_second(job, seed, precision), "plain PyTorch", threads=threads, limit_s=LIMIT_S
        )
    except RoundelayError:
        return None
    return rate or None


def _samples_per_second(job: Job, seed: int, precision: str) -> float:
    forget(job.loader)  # an open file would be read by both processes that have it
    model = copy.deepcopy(job.model)
    if not model.training:  # else some modules may be in eval mode on purpose, as in capture
        model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    scaler = torch.amp.GradScaler("cpu", enabled=precision == HALF)
    inputs_of = job.inputs or default_inputs
    times: list[float] = []
    began = start = time.perf_counter()
    for loaded in read_batches(job.loader, seed, Extent(batches=200)):
        batch = fresh(loaded)  # a copy, as in a run
        args, kwargs = inputs_of(batch)
        with autocast(precision, CPU):
            loss, count = checked(job.loss(model(*args, **kwargs), batch))
        scaler.scale(loss if count is None else loss / count).backward()
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        times.append((end - start) / num_rows(batch))  # including the loader's time
        start = end
        if end - began > BUDGET_S:
            break
    warm = times[2:] or times
    return 1.0 / statistics.median(warm) if warm else 0.0
