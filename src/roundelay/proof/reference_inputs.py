"""What a reference run is given: stages, copies of parameters, settings and optimizers, from a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from roundelay.frontend import Captured
from roundelay.ir.averages import EMA
from roundelay.ir.graph import Graph
from roundelay.job import Job
from roundelay.lower.reading import Reading
from roundelay.proof.fidelity_on_mesh import reference_stage
from roundelay.proof.reference_start import ReferenceStart
from roundelay.reference import Setting
from roundelay.reference.run_inputs import ReferenceStage
from roundelay.runtime.optimizer.optimizer_state import OptimizerState, changed_entries
from roundelay.runtime.optimizer.stage_optimizer import choose_alike
from roundelay.session.training import Session


def copied(
    captured: Captured, origin: ReferenceStart, stages: Sequence[ReferenceStage]
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that the reference begins with, each where its stage is."""
    trainable = {n: p.requires_grad for n, p in captured.model.named_parameters()}
    devices = {name: stage.device for stage in stages for name in stage.parameters}
    return [
        (n, torch.nn.Parameter(p.to(devices.get(n, "cpu"), copy=True), trainable[n]))
        for n, p in origin.parameters.items()
    ]


def reference_stages(session: Session) -> list[ReferenceStage]:
    """The stages as the reference runs them, with whose turn it is on each, and who updates it."""
    captured, plan = session.captured, session.plan
    stages = []
    for spec in session.partition.stages:
        stored = replace(spec, recomputed=()) if plan.backward == "stash" else spec  # recomputing makes no difference
        made = reference_stage(captured, stored, plan.mesh_size, torch.device(plan.device_of(spec.stage)))
        turns = len(plan.holders(spec.stage)) if session.reading.takes_turns else 0
        threads = plan.threads_of(spec.stage)
        stages.append(replace(made, turns=turns, updater=session.reading.updater(spec.stage), threads=threads))
    return stages


def setting_of(
    reading: Reading,
    graph: Graph,
    states: Mapping[str, Mapping[str, Any]] | None,
    loss_scale_at: tuple[float, int] | None,
    numbers: tuple[float, ...],
) -> Setting:
    """The reference's settings: from the plan, and of the state from which it starts."""
    plan = reading.plan
    return Setting(
        rule=reading.rule,
        predictor=plan.predictor,
        mode=plan.backward,  # type: ignore[arg-type]
        clip=plan.clip,
        loss_scale=plan.loss_scale,
        loss_scale_at=loss_scale_at,
        numbers=numbers,
        ema=plan.ema,
        labels_per_row=graph.labels_per_row,
        staggered=plan.batch_parts if reading.slotted else 0,
        shards=plan.shards,
        ema_at={name: state[EMA] for name, state in (states or {}).items() if EMA in state} or None,
    )


@final
class ReferenceOptimizers:
    """Makes the reference's optimizers, and reads and restores their state as a stage does.

    Args:
        job: the job.
        like: the entries of the run's whole optimizer.
        devices: of the plan.
    """

    def __init__(self, job: Job, like: Mapping[str, Any], devices: Sequence[str]) -> None:
        self._make, self._changed, self._devices = job.optimizer, changed_entries(like), devices
        self._made: dict[int, tuple[OptimizerState, dict[str, torch.nn.Parameter]]] = {}
        #: the first of a run, which trains; the others run ahead for rates
        self._first: tuple[OptimizerState, dict[str, torch.nn.Parameter]] | None = None

    def make(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The job's optimizer over these parameters."""
        optimizer = self._make(named)
        choose_alike(optimizer, self._devices)
        kept = OptimizerState(optimizer, named), dict(named)
        self._made[id(optimizer)] = kept
        self._first = self._first or kept
        return optimizer

    def entries(self, optimizer: torch.optim.Optimizer, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """The state that an optimizer which :meth:`make` has returned has of some parameters, and as a whole."""
        kept, own = self._made[id(optimizer)]
        kept.changed |= self._changed
        return kept.entries({name: parameter for name, parameter in own.items() if name in names}, copied=False)

    def restore(self, states: Mapping[str, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
        """Put a checkpoint's state into an optimizer that :meth:`make` has returned."""
        kept, own = self._made[id(optimizer)]
        kept.restore(own, states)

    def states(self, averaged: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """The state of the optimizer that has trained, with the averages from the reference's own state."""
        assert self._first is not None
        kept, own = self._first
        kept.changed |= self._changed
        entries, self._first = kept.entries(own), None
        for name, state in averaged.items():
            if EMA in state:
                entries.setdefault(name, {})[EMA] = state[EMA]
        return entries
