"""Measure a step of the person's optimizer over all weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from roundelay.frontend import Captured
from roundelay.ir.device_names import CPU
from roundelay.job import Job
from roundelay.planning.op_profiler import operation_clock
from roundelay.planning.stage_profiler import synchronized_s
from roundelay.planning.torch_scope import in_child, on_threads
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer

STEPS = 4
"""That are measured, after one that makes the optimizer's state; the fewest seconds count."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Seconds, as a child process returns them; 0 if the optimizer could not step."""

    seconds: float


def step_s(job: Job, captured: Captured, threads: int, device: str = CPU) -> float:
    """Seconds of a step on copies of the weights; 0 if the optimizer cannot make one here.

    Args:
        job: whose optimizer is used.
        captured: the model; not changed.
        threads: intra-op threads.
        device: where the weights are.
    """
    where = torch.device(device)

    def stepped() -> _Step:
        named = [(n, _copy(p, where)) for n, p in captured.model.named_parameters()]
        now, times = operation_clock() if device == CPU else partial(synchronized_s, where), list[float]()
        try:
            optimizer = build_optimizer(job.optimizer, named)
            for _ in range(1 + STEPS):
                start = now()
                optimizer.step()
                times.append(now() - start)
        except Exception:  # the person's own code
            return _Step(0.0)
        return _Step(min(times[1:]))

    with on_threads(threads):
        what = "measuring a step of the optimizer"
        return (in_child(stepped, what, _Step) if device == CPU else stepped()).seconds


def _copy(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """A copy with a gradient, if the weight is trained."""
    own = torch.nn.Parameter(parameter.detach().to(device, copy=True), parameter.requires_grad)
    own.grad = torch.full_like(own, 1e-6) if own.requires_grad else None
    return own
