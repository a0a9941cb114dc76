"""Looks at what a person's code keeps from call to call, where capture has seen it change something."""

from __future__ import annotations

import os
from typing import Any

import torch

from roundelay.errors import RunError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, fresh
from roundelay.frontend.face import default_inputs
from roundelay.frontend.reach import Change
from roundelay.frontend.stateful import refuse_state
from roundelay.job import Job
from roundelay.runtime.isolated import isolated

LIMIT_S = 120.0
"""Seconds that the calls may take in all."""


def check_stateless(job: Job, captured: Captured, sample: Batch) -> None:
    """Refuse a model or a loss whose next call reads what the last one has left.

    Only those are called whose capture has changed a slot: in a child, so that nobody sees it.

    Raises:
        CaptureError: the forward does.
        JobError: the loss does.
    """
    changed = captured.changed
    if not any(changed) or any(parameter.is_meta for parameter in job.model.parameters()):
        return

    def look() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what the person's code prints
            os.dup2(nowhere, stream)
        _look(job, sample, changed)

    if hasattr(os, "fork"):
        try:
            isolated(look, "looking for what the model keeps from call to call", limit_s=LIMIT_S)
        except RunError:  # it was killed, or took too long; what it looked for is not known
            return
    else:
        _look(job, sample, changed)


def _look(job: Job, sample: Batch, changed: tuple[tuple[Change, ...], tuple[Change, ...]]) -> None:
    def call() -> Any:
        batch = fresh(sample)
        args, kwargs = (job.inputs or default_inputs)(batch)
        result = job.model(*args, **kwargs)
        return result, job.loss(result, batch)

    with torch.random.fork_rng(devices=[]):
        of_loss = {change.slot.place for change in changed[1]} - {change.slot.place for change in changed[0]}
        refuse_state(job.model, call, [("model", job.model), ("loss", job.loss)], of_loss)
