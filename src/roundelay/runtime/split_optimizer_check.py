"""Checks that an optimizer with a part of a parameter updates it as one with the whole parameter does.

It does if it treats each element alone, as SGD and Adam do. It does not if it looks at the whole tensor: Adafactor's
row and column means, LAMB's norms, Muon's products. This is tried in a child process, on small tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from roundelay.errors import JobError, RunError
from roundelay.job import Job, Named
from roundelay.runtime.forked_call import isolated
from roundelay.runtime.nested_state import same_value
from roundelay.runtime.stage_optimizer import build_optimizer
from roundelay.runtime.stage_optimizer_check import LIMIT_S

SIZE = 16
"""Largest size of the tensors in each dimension."""

UPDATES = 3


def check_split(job: Job, named: Named, dims: Mapping[str, int]) -> None:
    """Refuse an optimizer that updates parts of parameters differently from the whole.

    Args:
        job: its optimizer.
        named: every parameter of the model; not changed.
        dims: in which dimension each parameter is split, for those that are, by name.

    Raises:
        JobError: naming the optimizer and the first parameter that differs.
    """
    if not dims:
        return
    if not hasattr(os, "fork"):
        with torch.random.fork_rng(devices=[]):
            _try(job, named, dims)
        return
    try:
        isolated(
            lambda: _try(job, named, dims), "trying the optimizer on parts of parameters", limit_s=LIMIT_S, quiet=True
        )
    except RunError:  # it was killed, or took too long
        return


def _try(job: Job, named: Named, dims: Mapping[str, int]) -> None:
    def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        dim = dims.get(name)
        return tensor if dim is None else tensor.narrow(dim, 0, max(1, tensor.shape[dim] // 2)).contiguous()

    with torch.compiler.set_stance("force_eager"):
        whole, kind = _updated(job, named, lambda name, tensor: tensor)
        parts, _ = _updated(job, named, half)
    for update, (of_whole, of_part) in enumerate(zip(whole, parts, strict=True), 1):
        for name, weight in of_part.items():
            if not same_value(half(name, of_whole[name]), weight):
                raise JobError(
                    f"Job(optimizer=...), {kind}",
                    got=f"another {name!r} after {update} updates where a worker has a part of the split parameters",
                    expected="an optimizer that treats each element alone, as SGD and Adam do",
                    remedy="Take such an optimizer, or leave out --tensor-parallel, --zero, or the plan's tables.",
                )


def _updated(
    job: Job, named: Named, part: Callable[[str, torch.Tensor], torch.Tensor]
) -> tuple[list[dict[str, torch.Tensor]], str]:
    """The weights after each of some updates with the same gradients, and the optimizer's class; less on an error."""
    generator = torch.Generator().manual_seed(0)
    copies, whole = [], {}
    for name, parameter in named:
        shape = [min(size, SIZE) for size in parameter.shape]
        weight = torch.randn(shape, generator=generator).to(parameter.dtype)
        whole[name] = shape
        copies.append((name, torch.nn.Parameter(part(name, weight).clone(), parameter.requires_grad)))
    torch.manual_seed(0)
    optimizer = build_optimizer(job.optimizer, copies)
    after: list[dict[str, torch.Tensor]] = []
    try:
        for _ in range(UPDATES):
            for name, copy in copies:
                gradient = torch.randn(whole[name], generator=generator).to(copy.dtype)
                copy.grad = part(name, gradient).clone() if copy.requires_grad else None
            optimizer.step()
            after.append({name: copy.detach().clone() for name, copy in copies})
    except Exception:  # the user's code: it fails in the run as well, which reports it
        return [], type(optimizer).__name__
    return after, type(optimizer).__name__
