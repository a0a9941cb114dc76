"""Calls a side of a comparison with plain PyTorch in this process, where it may use a GPU, and undoes what it changed.

A forked child cannot use CUDA once its parent has, nor run a backward. So a job that computes on a GPU, or in a process
that has used one, is compared in this process, one side after the other: plain PyTorch trains the user's own objects,
with the model's tensors moved to the device (:func:`move`). What it changes is put back: these tensors stay as they
were, and all else that the user's code can reach is restored as after a call by capture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.errors import RoundelayError
from roundelay.fork_safety import STARTED_WITHOUT_DEVICES
from roundelay.frontend.stages.keyed_rng import default_generators
from roundelay.guards.watch import reachable_state_of
from roundelay.ir.device_names import CPU
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.launching.forked_call import forked_backward_error
from roundelay.reach.reachable_state import reachable_tensors
from roundelay.runtime.device import make_device
from roundelay.runtime.processes.user_errors import explain_error


def must_share_process() -> bool:
    """Whether a forked child of this process could not train, even on the CPU."""
    return not hasattr(os, "fork") or (not STARTED_WITHOUT_DEVICES and bool(forked_backward_error()))


def compared_on(plan: Plan) -> torch.device:
    """Where a plan's job is compared with plain PyTorch: its first device that is not the CPU, if it has one."""
    return torch.device(next((name for name in plan.devices if name != CPU), CPU))


def call_in_process(call: Callable[[], Any], what: str, *, job: Job, device: torch.device) -> Any:
    """Call a function that trains the user's objects on a device, and leave them as they were.

    Args:
        call: returns plain data.
        what: what it does, for messages.
        job: whose objects it trains.
        device: the device; its cached memory is released afterwards.

    Raises:
        RoundelayError: the call raised it, or something else, which is explained.
    """
    try:
        with _undone(job), make_device(str(device)).active():
            return call()
    except RoundelayError:
        raise
    except Exception as error:  # of user code, or torch
        raise explain_error(error, what) from error
    finally:
        if device.type != CPU:
            torch.cuda.empty_cache()


def move(job: Job, device: torch.device) -> None:
    """Move a job's model to new memory on a device: parameters, buffers, and what of the user's objects shares theirs.

    `Module.to` would leave behind a view that an attribute keeps, or a buffer in a list, and part two tensors that
    share their memory; a person would then write the program in another way.
    """
    own = [*job.model.parameters(), *job.model.buffers()]
    addresses = {_address(tensor) for tensor in own} - {0}
    sharing = [t for t in reachable_tensors(reachable_state_of(job).roots) if _address(t) in addresses]
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in {id(tensor): tensor for tensor in (*own, *sharing)}.values():
        if not (at := _address(tensor)):
            tensor.data = tensor.data.to(device, copy=True)
            continue
        if at not in storages:
            storages[at] = _bytes_of(tensor).to(device, copy=True).untyped_storage()
        laid = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(storages[at], *laid)
    for module in job.model.modules() if device.type != CPU else ():
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor's memory; 0 if it has none that could be shared."""
    plain = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return tensor.untyped_storage().data_ptr() if plain else 0


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory."""
    none = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole: torch.Tensor = none.set_(tensor.untyped_storage())
    return whole


@contextmanager
def _undone(job: Job) -> Iterator[None]:
    """Restore the user's objects after the block: also the model's tensors, unlike a call by capture."""
    model, state = job.model, reachable_state_of(job)
    parameters = [(p, p.data, p.grad, p.requires_grad) for p in model.parameters()]
    buffers = [(b, b.data, b.detach().clone()) for b in model.buffers()]
    kept = [(t, t.data) for t in reachable_tensors(state.roots)]
    modes = {module: module.training for module in model.modules()}
    generators = [(generator, generator.get_state()) for generator in default_generators()]
    try:
        yield
    finally:
        state.restore()
        with torch.no_grad():
            for tensor, data in kept:
                tensor.data = data
            for parameter, data, grad, trained in parameters:
                parameter.data, parameter.grad = data, grad
                parameter.requires_grad_(trained)
            for buffer, data, value in buffers:
                buffer.data = data
                buffer.resize_(value.shape).copy_(value)
        for module, mode in modes.items():
            module.training = mode
        for generator, before in generators:
            generator.set_state(before)
