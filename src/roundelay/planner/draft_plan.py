"""The draft of a plan: what its choices say before the model is known. No torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from roundelay.ir.averages import NO_EMA
from roundelay.ir.clip import NO_CLIP, Clip
from roundelay.ir.loss_scale import DYNAMIC, NO_SCALE, LossScale
from roundelay.ir.plan import FORMAT, Plan
from roundelay.ir.residence import SHARDED
from roundelay.ir.rule import NO_PREDICTOR, UpdateRule, rule_named
from roundelay.ir.transports import transport_named
from roundelay.lower.validate_plan import HALF, PRECISIONS
from roundelay.planner.holder_choices import parts_of, replicas_of, shards_of
from roundelay.planner.plan_options import DEADLINE_S, Choices
from roundelay.schedules import LAYOUTS, PIPELINE, schedule_named

_T = TypeVar("_T")

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


def needs_micro_batches(rule: UpdateRule) -> bool:
    """Whether a rule needs as many micro-batches as stages: it has two versions, or predicts from partial sums."""
    return rule.versions == "table" or "partial" in rule.predictors


def _default_mode(rule: UpdateRule, choices: Choices) -> str:
    """The rule's first backward mode; on a mesh the first that runs in parts."""
    parted = [mode for mode in rule.modes if mode != "recompute" or parts_of(choices) == 1]
    return parted[0] if parted else rule.modes[0]


def parse_names(requested: str | Sequence[str]) -> tuple[str, ...]:
    """Parse ``a,b`` or a list of such texts into names."""
    names = requested.split(",") if isinstance(requested, str) else requested
    return tuple(name for one in names if (name := one.strip()) and name != NO_MODULES)


def _or(given: _T | None, default: _T) -> _T:
    return default if given is None else given


def draft_plan(model: str, rule: str, workers: int, choices: Choices) -> Plan:
    """The plan of choices, without stages, workers and edges.

    Args:
        model: fingerprint of the model.
        rule: update rule.
        workers: D, of each replica; what the default number of micro-batches depends on.
        choices: as of :func:`roundelay.planner.given_layout.in_layout`.

    Raises:
        PlanError: a name is unknown.
    """
    row, own = rule_named(rule), choices
    flushes = schedule_named(row.schedule).window == "batch"
    default = (2 * workers if workers > 1 else 1) if flushes else workers if needs_micro_batches(row) else 1
    transport = transport_named(_or(own.transport, "memory"))
    scaled = DYNAMIC if own.precision == HALF else str(NO_SCALE)
    return Plan(
        format=FORMAT,
        model=model,
        rule=rule,
        layout=_or(own.layout, PIPELINE),
        predictor=_or(own.predictor, row.predictors[0] if row.predicts else NO_PREDICTOR),
        backward=_or(own.backward, _default_mode(row, own)),
        recompute=(),
        compile=bool(own.compile),
        precision=_or(own.precision, PRECISIONS[0]),
        loss_scale=LossScale.parse(_or(own.loss_scale, scaled)),
        clip=NO_CLIP if own.clip is None else Clip.parse(own.clip),
        ema=_or(own.ema, NO_EMA),
        deterministic=bool(own.deterministic),
        replicas=replicas_of(own),
        micro_batches=_or(own.micro_batches, default),
        mesh={},
        parameters={},
        outputs={},
        states={},
        sharded=SHARDED[:1],
        shards=shards_of(own)[1],
        transport=transport.name,
        deadline_s=_or(own.deadline_s, DEADLINE_S),
        latency_s=transport.latency_s,
        bytes_per_s=transport.bytes_per_s,
        instruction_s=0.0,
        read_s=0.0,
        input_bytes=0,
        workers=(),
        stages=(),
        edges=(),
        exchanges=(),
    )
