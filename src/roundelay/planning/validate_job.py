"""Validate a job's fields before they are used, so that errors name the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import copy_batch, num_rows
from roundelay.job import Job

_FUNCTIONS = {"loss": True, "batches": True, "optimizer": True}
_FUNCTIONS |= {"inputs": False, "scheduler": False, "evaluate": False, "showcase": False}
"""Field to whether it must be given."""


def check_job(job: Job) -> None:
    """Check the types of a job's fields, and that its model is on the CPU or the meta device.

    Raises:
        JobError: naming the field.
    """
    if not isinstance(job.model, torch.nn.Module):
        raise _wrong("model", job.model, "a torch.nn.Module")
    for name, needed in _FUNCTIONS.items():
        value = getattr(job, name)
        if name == "batches" and isinstance(value, Iterator):
            raise JobError(
                "Job(batches=...)",
                got=f"a {type(value).__name__}, which can be read only once",
                expected="a DataLoader or a list, which can be iterated again, or a function: epoch number -> batches",
                remedy="Give the loader itself, not iter(loader); or a function that makes the generator.",
            )
        if not callable(value) and (needed or value is not None):
            raise _wrong(name, value, "a function" if needed else "a function, or None")
    for what, tensor in (*job.model.named_parameters(), *job.model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise JobError(
                f"Job(model=...), tensor {what!r}",
                got="one of a lazy module, which has no shape yet",
                expected="a model whose every tensor has its shape",
                remedy="Call the model once on a batch before it goes into the job.",
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise JobError(
                f"Job(model=...), tensor {what!r}",
                got=f"one on {tensor.device}",
                expected="a model on the CPU, or on the meta device together with weights=...",
                remedy="Leave the model on the CPU: the plan says on which device each stage runs (--devices).",
            )
    if not isinstance(job.weights, str | Path | None):
        raise _wrong("weights", job.weights, "the path of a file or folder, or None")
    steps: Any = job.steps
    if steps is not None and (not isinstance(steps, int) or steps < 1):
        raise _wrong("steps", steps, "a whole number of updates, at least 1, or None")


def check_inputs(job: Job, batch: Any) -> None:
    """Check that the first batch can be used, and that ``inputs`` accepts it.

    Raises:
        JobError: the batch cannot be used, or the function raises.
    """
    num_rows(batch)
    copied = _copy(batch)  # the function may take things out of it
    if job.inputs is None:
        return
    try:
        job.inputs(copied)
    except Exception as error:  # the user's own code
        raise JobError(
            "Job(inputs=...) on the first batch",
            got=f"{type(error).__name__}: {error}",
            expected="a function batch -> (args, kwargs)",
            remedy='For example: inputs=lambda batch: ((batch["x"],), {}).',
        ) from error


def _copy(batch: Any) -> Any:
    """Return a copy of a batch, which may be changed.

    Raises:
        JobError: a container in it cannot be constructed from its items.
    """
    try:
        return copy_batch(batch)
    except Exception as error:  # the person's own kind of batch
        raise JobError(
            f"the batch, a {type(batch).__name__}",
            got=f"{type(error).__name__}: {error}",
            expected="a dict, tuple or list, or a type that is constructed from its items as these are",
            remedy="Let batches(epoch) yield dicts or tuples; your own type must be constructed as dict or list are.",
        ) from error


def _wrong(name: str, value: Any, expected: str) -> JobError:
    return JobError(
        f"Job({name}=...)",
        got=f"{value!r:.80} of type {type(value).__name__}",
        expected=expected,
        remedy="Correct the job; help(roundelay.Job) in Python says what each field is.",
    )
