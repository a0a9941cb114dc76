"""Calls a side of a comparison with plain PyTorch in this process, where it may use a GPU, and undoes what it changed.

A forked child cannot use CUDA once its parent has. So a job that computes on a GPU is compared in this process, one
side after the other: plain PyTorch trains the user's own objects, moved to the device. What it changes is put back: the
model's tensors stay where they were on the CPU, and all else that the user's code can reach is restored as after a call
by capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.api.statelessness import reachable_state_of
from roundelay.errors import RoundelayError
from roundelay.frontend.keyed_rng import default_generators
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.validate_plan import CPU
from roundelay.runtime.device import make_device
from roundelay.runtime.user_errors import explain_error


def place_of(plan: Plan) -> torch.device:
    """Where a plan's job is compared with plain PyTorch: its first device that is not the CPU, if it has one."""
    return torch.device(next((name for name in plan.devices if name != CPU), CPU))


def call_in_process(call: Callable[[], Any], what: str, *, job: Job, place: torch.device) -> Any:
    """Call a function that trains the user's objects on a device, and leave them as they were.

    Args:
        call: returns plain data.
        what: what it does, for messages.
        job: whose objects it trains.
        place: the device; its cached memory is released afterwards.

    Raises:
        RoundelayError: the call raised it, or something else, which is explained.
    """
    try:
        with _undone(job), make_device(str(place)).active():
            return call()
    except RoundelayError:
        raise
    except Exception as error:  # of user code, or torch
        raise explain_error(error, what) from error
    finally:
        torch.cuda.empty_cache()


@contextmanager
def _undone(job: Job) -> Iterator[None]:
    """Restore the user's objects after the block: also the model's tensors, unlike a call by capture."""
    model, state = job.model, reachable_state_of(job)
    parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    modes = {module: module.training for module in model.modules()}
    generators = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield
    finally:
        state.restore()
        with torch.no_grad():
            for parameter, data, grad, trained in parameters:
                parameter.data, parameter.grad = data, grad
                parameter.requires_grad_(trained)
            for buffer, value in buffers:
                buffer.resize_(value.shape).copy_(value)
        for module, mode in modes.items():
            module.training = mode
        for generator, before in generators:
            generator.set_state(before)
