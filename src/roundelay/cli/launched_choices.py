"""What a launcher's environment makes of the choices of a command line."""

from __future__ import annotations

import math
from dataclasses import replace

from roundelay.env import launched
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.launching.launch import needs_launcher
from roundelay.launching.process_group import ProcessGroup
from roundelay.launching.rendezvous import LaunchedGroup
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.plan_options import Choices
from roundelay.runtime.device import num_cuda_devices
from roundelay.schedules import LAYOUTS, PIPELINE


def joined(choices: Choices, restarts: int, *, planned: bool = False) -> tuple[ProcessGroup | None, Choices]:
    """The process group of this process, if a launcher has started it, and the choices that follow from it.

    Args:
        choices: of the command line.
        restarts: the option of this name.
        planned: whether there is a plan or a run that is continued, which may say how many holders a stage has.

    Raises:
        UsageError: a choice is not possible under a launcher.
    """
    place = launched()
    if place is None:
        if choices.transport == "nccl":
            raise needs_launcher()
        return None, choices
    transport = _between(choices, -(-place.size // place.nodes))
    processes = f"the launcher has started {place.size} processes, one worker each"
    restarting = "the launcher restarts; with `--out` a run then continues by itself"
    _require("--transport", choices.transport, transport, processes)
    _require("--restarts", restarts or None, 0, restarting)
    if not planned:
        spread(choices, place.size, None)  # so that what does not fit is refused at once
    return LaunchedGroup(place), replace(choices, transport=transport)


def spread(choices: Choices, size: int, known: Plan | None) -> Choices:
    """The choices for a launcher's processes, of which each is one worker.

    Args:
        choices: of the command line.
        size: how many processes there are.
        known: a plan that is known before, if any.

    Raises:
        UsageError: the processes are not as many as the choices ask for.
    """
    processes = f"the launcher has started {size} processes, one worker each"
    layout = choices.layout or (PIPELINE if known is None else known.layout)
    if layout != PIPELINE:  # which says itself how many workers it has
        if layout not in LAYOUTS or not LAYOUTS[layout].replicates:
            return choices
        _require("--micro-batches", choices.micro_batches or choices.data_parallel, size, processes)
        return replace(choices, micro_batches=size)
    replicas, mesh_size = (1, 1) if known is None else (known.replicas, known.mesh_size)
    holders = {
        "--data-parallel": replicas_of(choices) if {"data_parallel", "hybrid"} & choices.names() else replicas,
        "--tensor-parallel": mesh_size if choices.tensor_parallel is None else choices.tensor_parallel,
    }
    if choices.signatures is not None:
        holders["--tensor-parallel"] = parts_of(replace(choices, tensor_parallel=None))
    each, rest = divmod(size, max(1, math.prod(holders.values())))
    if rest or not each:
        several = {name: value for name, value in holders.items() if value > 1}
        raise UsageError(
            f"{' and '.join(several)} under a launcher",
            got=" and ".join(map(str, several.values())),
            expected=f"a divisor of {size}: {processes}",
            remedy="Start as many processes as the holders of a stage, times the number of stages.",
        )
    _require("--workers", choices.workers, each, processes)
    return replace(choices, workers=each)


def _require(name: str, given: object, required: object, why: str) -> None:
    if given not in (None, required):
        raise UsageError(
            f"{name} under a launcher", got=str(given), expected=f"{required}: {why}", remedy=f"Leave {name} out."
        )


def _between(choices: Choices, processes: int) -> str:
    """The transport between a launcher's processes: nccl if chosen, or if this host has a device per process."""
    if choices.transport is not None:
        return choices.transport if choices.transport == "nccl" else "gloo"
    wanted = num_cuda_devices() >= processes if choices.devices is None else "cuda" in choices.devices
    return "nccl" if wanted else "gloo"
