"""The one door to the guards: what would train otherwise than plain PyTorch is refused here, before the first update.

Capture refuses what it cannot express (:mod:`roundelay.frontend.export.export_checks`); the guards refuse what it
expresses, but what a pipeline would compute differently. :mod:`roundelay.guards.watch` undoes what trial calls leave.
"""

from __future__ import annotations

from dataclasses import replace

from roundelay.errors import JobError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.guards.lr_schedule_check import check_reproducible
from roundelay.guards.optimizer_checks import check_narrowing, check_sharing, check_split, refuse_hooks_on_parts
from roundelay.guards.statelessness import check_metrics, check_reused, check_stateless
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job


def examine(job: Job, captured: Captured, sample: Batch) -> Captured:
    """Examine a job that has just been captured, whatever its plan will be; returns what is known of it now.

    Args:
        job: the job; left as it was.
        captured: its model.
        sample: the batch that it was captured on.

    Raises:
        CaptureError: the forward keeps state between calls.
        JobError: the loss does, the data depend on the training, parameters share memory, the optimizer's or the
            scheduler's function returns something else at each call, or it needs evaluations that are not made.
    """
    of_metric = check_stateless(job, captured, sample)
    if captured.sharing:
        check_sharing(job, captured.sharing)
    if check_reproducible(job).waits and job.evaluate is None:
        raise JobError(
            "Job(scheduler=...), a ReduceLROnPlateau",
            got="no Job(evaluate=...)",
            expected="a number after every epoch, on which the learning rate depends",
            remedy='Give evaluate=lambda model: {"loss": ...}, or a scheduler that needs no number.',
        )
    return replace(captured, effects=replace(captured.effects, read_by_metric=of_metric))


def examine_run(
    job: Job, captured: Captured, plan: Plan, stages: Partition, *, batches: int | None, epochs: int | None
) -> None:
    """Examine a job together with the plan by which it is about to run.

    Args:
        job: the job.
        captured: its model, on the plan's mesh.
        plan: the plan.
        stages: the plan's.
        batches: number of batches of the run; None if it is given by epochs.
        epochs: number of epochs; None if it is given by batches.

    Raises:
        JobError: the optimizer would update a stage's parameters, or parts of them, differently from the whole
            model's; a metric depends on earlier calls; or the second epoch would read what the first has written.
        PlanError: a gradient on which there is a hook is in parts.
    """
    named = list(job.model.named_parameters())
    check_metrics(captured, len(plan.stages[-1].workers) // plan.mesh_size)
    check_narrowing(job, named, [stage.parameters for stage in stages.stages])
    refuse_hooks_on_parts(captured)
    for splits in ({} if captured.sharding is None else captured.sharding.parameters, captured.states):
        check_split(job, named, {name: split.dim for name, split in splits.items()})
    check_reused(job, captured, batches=batches, epochs=epochs)
