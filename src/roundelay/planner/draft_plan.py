"""The draft of a plan: what its choices say before the model is known. No torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from roundelay.errors import PlanError
from roundelay.ir.averages import NO_EMA
from roundelay.ir.clip import NO_CLIP, Clip
from roundelay.ir.loss_scale import DYNAMIC, NO_SCALE, LossScale
from roundelay.ir.plan import FORMAT, Plan
from roundelay.ir.rule import NO_PREDICTOR, UpdateRule, rule_named
from roundelay.ir.transports import transport_named
from roundelay.lower.validate_plan import HALF, PRECISIONS
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.schedules import LAYOUTS, PIPELINE, schedule_named

PLAIN = "1f1b"
"""The rule of a pipeline: it trains what plain PyTorch does."""

STAGGERED = "cdp-v2"
"""The rule of the layouts, which were made for it."""


def default_rule(layout: str) -> str:
    """The rule of a layout; an unknown layout is refused elsewhere."""
    return STAGGERED if layout in LAYOUTS else PLAIN


TENSOR = "tensor"
"""The axis of the mesh of ``--tensor-parallel``."""

NO_MODULES = "none"
"""In place of names of modules to recompute: no module, not even one that the model itself checkpoints."""


def check_kinds(given: Mapping[str, Any]) -> None:
    """Refuse numbers and names that are something else.

    Raises:
        PlanError: naming the choice.
    """
    for names, kind, expected in ((_NUMBERS, Integral, "a whole number"), (_NAMES, str, "a name")):
        for name in names:
            value = given.get(name)
            if value is not None and (type(value) is bool or not isinstance(value, kind)):
                raise PlanError(name, got=repr(value), expected=expected, remedy=f"Correct {name}.")


_NUMBERS = ("workers", "stages", "data_parallel", "tensor_parallel", "zero", "micro_batches", "threads")
_NAMES = ("layout", "predictor", "backward", "precision", "loss_scale", "clip", "transport")


def needs_micro_batches(rule: UpdateRule) -> bool:
    """Whether a rule needs as many micro-batches as stages: it has two versions, or predicts from partial sums."""
    return rule.versions == "table" or "partial" in rule.predictors


def _default_mode(rule: UpdateRule, given: Mapping[str, Any]) -> str:
    """The rule's first backward mode; on a mesh the first that runs in parts."""
    parted = [mode for mode in rule.modes if mode != "recompute" or parts_of(given) == 1]
    return parted[0] if parted else rule.modes[0]


def parse_names(requested: str | Sequence[str]) -> tuple[str, ...]:
    """Parse ``a,b`` or a list of such texts into names."""
    names = requested.split(",") if isinstance(requested, str) else requested
    return tuple(name for one in names if (name := one.strip()) and name != NO_MODULES)


def draft_plan(model: str, rule: str, workers: int, given: Mapping[str, Any]) -> Plan:
    """The plan of choices, without stages, workers and edges.

    Args:
        model: fingerprint of the model.
        rule: update rule.
        workers: D, of each replica; what the default number of micro-batches depends on.
        given: choices as of :func:`roundelay.planner.given_layout.in_layout`.

    Raises:
        PlanError: a name is unknown.
    """
    row = rule_named(rule)
    flushes = schedule_named(row.schedule).window == "batch"
    default = (2 * workers if workers > 1 else 1) if flushes else workers if needs_micro_batches(row) else 1
    transport = transport_named(given.get("transport", "memory"))
    return Plan(
        format=FORMAT,
        model=model,
        rule=rule,
        layout=given.get("layout", PIPELINE),
        predictor=given.get("predictor", row.predictors[0] if row.predicts else NO_PREDICTOR),
        backward=given.get("backward", _default_mode(row, given)),
        recompute=(),
        compile=given.get("compile", False),
        precision=given.get("precision", PRECISIONS[0]),
        loss_scale=LossScale.parse(
            str(given.get("loss_scale", DYNAMIC if given.get("precision") == HALF else NO_SCALE))
        ),
        clip=Clip.parse(str(given.get("clip", NO_CLIP))),
        ema=given.get("ema", NO_EMA),
        deterministic=given.get("deterministic", False),
        replicas=replicas_of(given),
        micro_batches=given.get("micro_batches", default),
        mesh={},
        parameters={},
        outputs={},
        states={},
        transport=transport.name,
        deadline_s=given["deadline_s"],
        latency_s=transport.latency_s,
        bytes_per_s=transport.bytes_per_s,
        read_s=0.0,
        input_bytes=0,
        workers=(),
        stages=(),
        edges=(),
        exchanges=(),
    )
