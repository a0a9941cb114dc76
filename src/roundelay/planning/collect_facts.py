"""Collect what a planner must know of a job, once; from then on it needs neither the job nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from roundelay.frontend.batch import Batch, in_step, num_rows, split
from roundelay.ir.device_names import CPU
from roundelay.lower.laid_graph import LaidGraph
from roundelay.planner.draft_plan import PLAIN, draft_plan
from roundelay.planner.model_facts import AtRows, ModelFacts, plain_mesh
from roundelay.planner.plan_options import DEADLINE_S, Choices
from roundelay.planner.split_states import longest_dimensions
from roundelay.planning.examined import Examined
from roundelay.planning.memory_report import held_by_optimizer
from roundelay.planning.optimizer_step import step_s
from roundelay.planning.profiling import profiled, saved_storages
from roundelay.planning.torch_scope import in_child, user_code
from roundelay.runtime.loading.loader_probe import first_batch, reading_s

PARTS = (2, 8)
"""Into how many parts the first batches are cut, to see whether they may be."""


def collect_facts(
    source: Examined,
    *,
    precision: str | None = None,
    parts: Sequence[int] = PARTS,
    threads: Sequence[int] = (1,),
    device: str = CPU,
) -> ModelFacts:
    """Look at a job as closely as its planner will have to.

    Args:
        source: the job.
        precision: in which the model will be computed; by default ``fp32``.
        parts: into how many parts the first batches are cut, to see whether they may be.
        threads: numbers of intra-op threads with which the operations are measured.
        device: where they are measured: plans for others cannot be priced.

    Raises:
        UserCodeError: the model or its loss fails.
        DeadlineError: a batch did not come in time.
    """
    draft = draft_plan(source.graph.fingerprint, PLAIN, 1, Choices(precision=precision))
    divisible = {number: source.divisibility(draft, number) for number in parts}
    lowered = source.lowered(draft)
    batch = first_batch(source.job.loader, source.seed, DEADLINE_S, source.tell)
    with lowered.untouched():
        sizes = _sizes(batch, lowered.graph.min_rows)
        measured = tuple([one for count in sorted(threads) for one in _measured(lowered, sizes, count, device)])
        with user_code("counting what the operations keep"):
            saved = saved_storages(lowered.captured, sizes[-1])
        unused = _unused(lowered, batch)
    mesh = plain_mesh(lowered.mesh_facts())
    over = [op.name for op in mesh.ops if op.form.over is not None]
    sets = dict.fromkeys([(name,) for name in over] + ([tuple(over)] if over else []))
    dims = {n: split.dim for n, split in longest_dimensions(LaidGraph(lowered.graph), 2).items()}
    rows = max(1, lowered.graph.sample_rows)
    return ModelFacts(
        precision=draft.precision,
        device=torch.device(device).type,
        graph=lowered.graph,
        checkpointed=lowered.checkpointed,
        mesh=mesh,
        rewritten={",".join(names): plain_mesh(lowered.written_out(names)) for names in sets},
        divisible=divisible,
        measured=measured,
        saved=saved,
        unused=unused,
        whole=dict(lowered.whole_states(dims)),
        state_bytes=held_by_optimizer(lowered.job, lowered.captured, draft),
        read_row_s=reading_s(source.job.loader, source.seed, 1, DEADLINE_S, source.tell) / rows,
    )


def _sizes(batch: Batch, min_rows: int) -> list[Batch]:
    """An eighth of a batch, half of it and all of it; all of it alone if it cannot be cut."""
    parts = [split(batch, count, min_rows)[0] for count in (8, 2)] if in_step(batch) else []
    return list({num_rows(part): part for part in (*parts, batch)}.values())


def _measured(source: Examined, sizes: Sequence[Batch], threads: int, device: str) -> Iterator[AtRows]:
    """Every size with so many threads; what an update takes is what the job's own optimizer takes."""
    whole_s = step_s(source.job, source.captured, threads, device)
    for part in sizes:
        profile, _ = profiled(source.captured, part, threads, device)
        copied_s = sum(profile.update_s)
        if whole_s and copied_s:
            profile = replace(profile, update_s=tuple([own * whole_s / copied_s for own in profile.update_s]))
        yield AtRows(num_rows(part), threads, profile)


def _unused(source: Examined, batch: Batch) -> tuple[str, ...]:
    """Names of trained parameters that get no gradient."""
    what = "looking for parameters without a gradient"

    def names() -> Unused:
        captured = source.captured
        trained = {name: weight for name, weight in captured.parameters().items() if weight.requires_grad}
        loss = captured.walk(batch, lambda _, call: call())
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return Unused(tuple([name for name, one in zip(trained, found, strict=True) if one is None]))  # type: ignore[redundant-expr]

    with user_code(what):
        return in_child(names, what, Unused).names


@dataclass(frozen=True, slots=True)
class Unused:
    """Names of parameters, as a child process returns them."""

    names: tuple[str, ...]
