"""Schedules: the order in which every worker runs forwards, backwards and updates. One file per family.

A schedule is added by a file of this folder that registers it (and an update rule that runs on it), and a line below.
"""

from roundelay.ir.rule import UpdateRule
from roundelay.schedules import gpipe_1f1b, interleaved, zero_bubble
from roundelay.schedules.cyclic import LAYOUTS, PIPELINE, SYNCHRONOUS, Form, Seat, StateRoute, holders_of, laid_out
from roundelay.schedules.schedule import SCHEDULES, Body, Schedule, actions, register_schedule, schedule_named

__all__ = [
    "LAYOUTS",
    "PIPELINE",
    "SCHEDULES",
    "SYNCHRONOUS",
    "Body",
    "Form",
    "Schedule",
    "StateRoute",
    "actions",
    "form_for",
    "gpipe_1f1b",
    "holders_of",
    "interleaved",
    "register_schedule",
    "schedule_for",
    "schedule_named",
    "zero_bubble",
]


def form_for(rule: UpdateRule, layout: str) -> Form | None:
    """The form that a rule has in a layout; None in a pipeline, or if the rule has no form there."""
    if layout == PIPELINE or rule.versions == "table":
        return LAYOUTS.get(layout)
    return SYNCHRONOUS.get((layout, rule.schedule))


def schedule_for(
    rule: UpdateRule,
    layout: str = PIPELINE,
    holder: int = 0,
    size: int = 1,
    num_stages: int = 1,
    *,
    together: bool = False,
) -> Schedule:
    """The schedule of a rule in a layout.

    Args:
        rule: the rule.
        layout: ``pipeline`` for the rule's own schedule, or a form of cyclic data parallelism.
        holder: whose loop, by its number among the holders of its stages.
        size: N, micro-batches of a batch.
        num_stages: S.
        together: whether the updates of a worker's stages wait for the gradients of all stages; of a layout.

    Raises:
        PlanError: there is no such schedule.
    """
    form = form_for(rule, layout)
    if form is None:
        return schedule_named(rule.schedule)

    def fresh(micro_batch: int, stage: int) -> bool:
        return rule.is_fresh(micro_batch + 1, stage + 1, num_stages, size)

    return laid_out(form, Seat(holder, size, fresh, together))
