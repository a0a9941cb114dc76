"""Validates what a plan's layout can be combined with."""

from __future__ import annotations

from roundelay.errors import PlanError
from roundelay.ir.clip import NO_CLIP, Clip
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.schedules import LAYOUTS, PIPELINE, SYNCHRONOUS, form_for


def check_layout(plan: Plan) -> None:
    """Check that there is such a layout, and that a form of cyclic data parallelism can be combined with the rest.

    Raises:
        PlanError: naming the first field that does not fit.
    """
    if plan.layout not in (PIPELINE, *LAYOUTS):
        raise PlanError(
            "layout of the plan",
            got=repr(plan.layout),
            expected=f"one of {', '.join([PIPELINE, *LAYOUTS])}",
            remedy="Correct the plan or --layout.",
        )
    if plan.layout == PIPELINE:
        return
    form, clip = form_for(rule_named(plan.rule), plan.layout), Clip.parse(plan.clip)
    if form is None:
        synchronous = [rule for layout, rule in SYNCHRONOUS if layout == plan.layout]
        raise PlanError(
            f"rule of the plan, with layout {plan.layout}",
            got=plan.rule,
            expected=", ".join(["cdp-v1", "cdp-v2", "pipedream-2bw", *synchronous])
            + ", or a rule of your own with a table of versions",
            remedy="Change --rule, or leave --layout out.",
        )
    refused = {
        "replicas": (plan.replicas > 1 and not form.replicates, str(plan.replicas), "1"),
        "micro_batches": (plan.micro_batches > 1 and form.replicates, str(plan.micro_batches), "1 on each worker"),
        "mesh": (plan.mesh_size > 1, str(dict(plan.mesh)), "none"),
        "states": (bool(plan.states), "split states", "whole ones"),
        "clip": (
            form.staggered and clip.by not in (NO_CLIP.by, "stage"),
            plan.clip,
            "none or stage:NORM: staggered micro-batches update stages at different times, some before others' "
            "gradients are complete",
        ),
        "loss_scale": (
            form.staggered and LossScale.parse(plan.loss_scale).on,
            plan.loss_scale,
            "none: give --precision bf16 or fp32",
        ),
    }
    for name, (wrong, got, expected) in refused.items():
        if wrong:
            raise PlanError(
                f"{name} of the plan, with layout {plan.layout}",
                got=got,
                expected=expected,
                remedy="Change that, or leave --layout out.",
            )
