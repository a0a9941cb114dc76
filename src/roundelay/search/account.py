"""What a plan's predicted time and memory consist of. No torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner.memory_model import MemoryEstimate, estimate_memory
from roundelay.planner.price import BATCHES
from roundelay.simulator import Simulation, simulate
from roundelay.simulator.critical_path import COMPUTE, OF_OPCODE, Piece, critical_path, terms


@dataclass(frozen=True, slots=True)
class StageAccount:
    """One stage.

    Args:
        stage: its number.
        workers: that hold it.
        on_path_s: seconds of a batch that the run's critical path spends on its computation.
        computes_s: seconds of a batch that each of its workers computes it.
    """

    stage: int
    workers: tuple[int, ...]
    on_path_s: float
    computes_s: float


@dataclass(frozen=True, slots=True)
class Account:
    """Where a plan's time and memory go, by prediction.

    Args:
        batch_s: seconds of a batch.
        terms: of these seconds along the critical path, the most first; they add up to it.
        stages: of the plan.
        busy: share of its time that each worker computes.
        memory: of each worker; without the optimizer's states, of which a plan does not tell.
        simulation: of :data:`BATCHES` batches.
        path: its critical path.
    """

    batch_s: float
    terms: Mapping[str, float] = field(hash=False)
    stages: tuple[StageAccount, ...]
    busy: tuple[float, ...]
    memory: tuple[MemoryEstimate, ...]
    simulation: Simulation
    path: tuple[Piece, ...]


def account(plan: Plan) -> Account:
    """Where a plan's time and memory go.

    Args:
        plan: a plan that can be executed.

    Raises:
        PlanError: it cannot be executed.
    """
    programs = emit(read(plan))
    simulation = simulate(plan, programs, stream([plan.micro_batches] * BATCHES))
    path = critical_path(simulation.spans(), programs)
    busy: dict[int, dict[int, float]] = {k: {} for k in range(plan.num_stages)}
    for one in simulation.intervals:
        if OF_OPCODE.get(one.opcode) == COMPUTE:
            busy[one.stage][one.worker] = busy[one.stage].get(one.worker, 0.0) + one.end_s - one.start_s
    return Account(
        batch_s=simulation.makespan_s / BATCHES,
        terms={name: seconds / BATCHES for name, seconds in terms(path).items()},
        stages=tuple([_of_stage(plan, k, path, busy[k]) for k in range(plan.num_stages)]),
        busy=tuple(worker.busy_s / (simulation.makespan_s or 1.0) for worker in simulation.workers),
        memory=estimate_memory(plan, [0] * plan.num_stages),
        simulation=simulation,
        path=path,
    )


def _of_stage(plan: Plan, stage: int, path: Sequence[Piece], busy: Mapping[int, float]) -> StageAccount:
    own = sum(piece.end_s - piece.start_s for piece in path if (piece.term, piece.stage) == (COMPUTE, stage))
    return StageAccount(stage, tuple(plan.holders(stage)), own / BATCHES, max(busy.values(), default=0.0) / BATCHES)
