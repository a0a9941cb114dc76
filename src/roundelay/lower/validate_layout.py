"""Validates what a plan's layout can be combined with."""

from __future__ import annotations

from itertools import product

from roundelay.errors import PlanError
from roundelay.ir.clip import NO_CLIP
from roundelay.lower.reading import Reading
from roundelay.schedules import PIPELINE, SYNCHRONOUS


def check_layout(reading: Reading) -> None:
    """Check that a form of cyclic data parallelism can be combined with the rest.

    Raises:
        PlanError: naming the first field that does not fit.
    """
    plan = reading.plan
    if plan.layout == PIPELINE:
        return
    form, clip = reading.form, plan.clip
    if form is None:
        synchronous = [rule for layout, rule in SYNCHRONOUS if layout == plan.layout]
        raise PlanError(
            f"rule of the plan, with layout {plan.layout}",
            got=plan.rule,
            expected=", ".join(["cdp-v1", "cdp-v2", "pipedream-2bw", *synchronous])
            + ", or a rule of your own with a table of versions",
            remedy="Choose another rule, or no --layout: a pipeline.",
        )
    refused = {
        "replicas": (plan.replicas > 1 and not form.replicates, str(plan.replicas), "1"),
        "micro_batches": (plan.micro_batches > 1 and form.replicates, str(plan.micro_batches), "1 on each worker"),
        "mesh": (plan.mesh_size > 1, str(dict(plan.mesh)), "none"),
        "states": (bool(plan.states), "split states", "whole ones"),
        "clip": (
            form.staggered and clip.by not in (NO_CLIP.by, "stage", *(["global"] if _waits(reading) else [])),
            plan.clip,
            "none or stage:NORM, or, with layout dp and a rule that reads W[t-1] everywhere, such as cdp-v1, "
            "global:NORM: else stages are updated before the gradients of others are complete",
        ),
        "loss_scale": (
            form.staggered and plan.loss_scale.on,
            plan.loss_scale,
            "none: give --precision bf16 or fp32",
        ),
    }
    for name, (wrong, got, expected) in refused.items():
        if wrong:
            raise PlanError(
                f"{name} of the plan, with layout {plan.layout}",
                got=str(got),
                expected=expected,
                remedy="Change that, or choose no --layout: a pipeline.",
            )


def _waits(reading: Reading) -> bool:
    """Whether updates can wait for the gradients of all stages: all are in `dp`, and no forward reads W[t]."""
    plan = reading.plan
    rule, size = reading.rule, plan.batch_parts
    numbers = product(range(1, size + 1), range(1, plan.num_stages + 1))
    return plan.layout == "dp" and not any(rule.is_fresh(i, j, plan.num_stages, size) for i, j in numbers)
