"""Compile a plan's stages before any worker starts.

Compilation happens in the process that starts the workers: forked workers inherit the compiled functions, threads and
the reference share them, and no deadline of the run has begun. Where a backward in this process would break later forks
(:mod:`roundelay.fork_safety`), a child compiles first, which fills inductor's cache on disk; then each worker, and the
reference's process, compiles from that cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from roundelay.errors import RoundelayError, UserCodeError
from roundelay.frontend import Captured
from roundelay.frontend.batch import leaves, split
from roundelay.frontend.stages.compiled_segment import check_compiler
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.lower.validate_plan import check_precision
from roundelay.planning.on_mesh import on_mesh
from roundelay.planning.stage_profiler import compile_for
from roundelay.planning.torch_scope import on_threads, without_dumps
from roundelay.runtime.loading.loader_probe import first_batch


def for_plan(captured: Captured, plan: Plan) -> Captured:
    """Return the model with the plan's precision, compilation and mesh applied.

    Raises:
        PlanError: the precision is unknown, or cannot be compiled.
        CaptureError: the model cannot be computed in it.
    """
    check_precision(plan)
    lowered = captured.lowering(plan.precision).compiling(plan.backward if plan.compile else None)  # type: ignore[arg-type]
    return on_mesh(lowered, plan)


Compile = Callable[[Collection[int]], None]
"""Compiles the stages of these numbers, unless this process has compiled them already.

Raises :class:`CaptureError` if a stage cannot be compiled.
"""


def compile_stages(job: Job, captured: Captured, plan: Plan, stages: Partition, seed: int) -> None:
    """Compile all stages in this process if the plan says so; see :func:`stage_compiler`."""
    if plan.compile:
        stage_compiler(job, captured, plan, stages, seed)(range(plan.num_stages))


def stage_compiler(job: Job, captured: Captured, plan: Plan, stages: Partition, seed: int) -> Compile:
    """Read the run's first batch, and return a function that compiles the plan's stages for its micro-batches.

    Args:
        job: the job.
        captured: its model, :func:`for_plan`.
        plan: the plan.
        stages: its stages.
        seed: of the run.

    Raises:
        PlanError: there is no C++ compiler.
    """
    check_compiler()
    samples = list(_one_of_each_size(captured, first_batch(job.loader, seed, plan.deadline_s), plan.batch_parts))
    return partial(_compile, captured, stages, samples, plan.threads)


def _compile(
    captured: Captured, stages: Partition, samples: Sequence[Any], threads: int, numbers: Collection[int]
) -> None:
    try:
        with on_threads(threads), without_dumps():
            for micro_batch in samples:
                compile_for(captured, stages, micro_batch, numbers)
    except RoundelayError:
        raise
    except Exception as error:  # the user's own code, or what torch compiled of it
        raise UserCodeError(
            "compiling the stages for the first batch",
            got=f"{type(error).__name__}: {str(error).strip()[:500]}",
            expected="a model that computes the same compiled and uncompiled",
            remedy="Leave --compile out; ROUNDELAY_DEBUG=1 shows the traceback.",
        ) from error


def _one_of_each_size(captured: Captured, batch: Any, micro_batches: int) -> Iterator[Any]:
    """Yield one micro-batch of each size."""
    seen = set()
    for part in split(batch, max(1, micro_batches), captured.graph.min_rows):
        shapes = tuple(leaf.shape for leaf in leaves(part).values())
        if shapes not in seen:
            seen.add(shapes)
            yield part
