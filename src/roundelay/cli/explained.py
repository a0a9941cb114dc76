"""What ``roundelay explain`` finds, as the JSON object that it prints and that its page holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from roundelay.errors import UsageError
from roundelay.ir.exchange import GRADIENT_PARTS, USED
from roundelay.ir.plan import Plan
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.plan_options import Choices
from roundelay.search.account import Account, StageAccount
from roundelay.simulator.simulation import exchange_s

_BESIDE_CHOICES = ("cuts", "signatures")
"""Choices that are told otherwise: by the stages' ends and by the plan's own text."""


def explained(plan: Plan, own: Account) -> dict[str, Any]:
    """What a plan's predicted time and memory consist of; times in seconds, sizes in bytes."""
    choices = inherited(plan, Choices()).given()
    return {
        "rule": plan.rule,
        "arrangement": plan.arrangement,
        "micro_batches": plan.micro_batches,
        "batch_s": own.batch_s,
        "choices": {name: value for name, value in choices.items() if name not in _BESIDE_CHOICES},
        "terms": dict(own.terms),
        "stages": [_stage(plan, one, own.batch_s) for one in own.stages],
        "workers": [asdict(worker) for worker in plan.workers],
        "edges": [
            {name: getattr(edge, name) for name in ("source", "target", "forward_bytes", "backward_bytes")}
            for edge in plan.edges
        ],
        "busy": list(own.busy),
        "memory": [{k: v for k, v in one.items().items() if k != "optimizer"} for one in own.memory],
        "critical_path": [asdict(piece) for piece in own.path],
    }


def beside(own: Mapping[str, Any], name: str, other: Mapping[str, Any]) -> dict[str, Any]:
    """Another plan, and how many seconds more each term of it takes."""
    names = dict.fromkeys([*own["terms"], *other["terms"]])
    more = {term: other["terms"].get(term, 0.0) - own["terms"].get(term, 0.0) for term in names}
    return {"name": name, **other, "more": more, "more_s": other["batch_s"] - own["batch_s"]}


def _stage(plan: Plan, own: StageAccount, batch_s: float) -> dict[str, Any]:
    stage = plan.stages[own.stage]
    return {
        "stage": own.stage,
        "workers": list(own.workers),
        "up_to": stage.segments[-1] if stage.segments else "",
        "weight_bytes": stage.parameter_bytes,
        **{name: getattr(stage, name) for name in ("forward_s", "backward_s", "weights_s", "update_s")},
        "computes_s": own.computes_s,
        "on_path_s": own.on_path_s,
        "on_path_share": own.on_path_s / batch_s,
        "exchanges": _exchanges(plan, own.stage),
    }


def _exchanges(plan: Plan, stage: int) -> list[dict[str, Any]]:
    """What the holders of a stage exchange in phases, by kind and axis."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in plan.exchanges:
        if one.stage == stage and one.phases:
            often = "micro-batch" if one.value or one.kind in (*USED, GRADIENT_PARTS) else "batch"
            new = {"kind": one.kind, "axis": one.axis, "every": often, "count": 0, "bytes": 0, "seconds": 0.0}
            row = found.setdefault((one.kind, one.axis), new)
            row["count"] += 1
            row["bytes"] += one.num_bytes
            row["seconds"] += exchange_s(plan, one, plan.grid.sizes[one.axis])
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan in the JSON object of a search."""

    choices: Mapping[str, Any] = field(hash=False)
    predicted_s: float
    memory_bytes: int | None
    name: str = ""
    measured_s: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Search:
    """The JSON object of a search, as far as it tells of plans."""

    chosen: _Found
    top: Sequence[_Found]
    baselines: Mapping[str, _Found | None] = field(hash=False)
    finals: Sequence[_Found]


def alternatives(path: Path) -> list[dict[str, Any]]:
    """The plans of a search, the chosen one first, the others by predicted time.

    Args:
        path: what ``roundelay plan --search --json`` has printed.

    Raises:
        UsageError: it is something else, or cannot be read.
    """
    try:
        search = msgspec.json.decode(path.read_bytes(), type=_Search)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"the search {path}",
            got=str(error),
            expected="the object that `roundelay plan --search --json` prints",
            remedy="Write it anew: roundelay plan JOB.py --search --workers N --json > FILE.",
        ) from error
    families = [replace(one, name=name) for name, one in search.baselines.items() if one is not None]
    best = [replace(one, name=f"best {i + 1}") for i, one in enumerate(search.top)]
    found = {str(one.choices): one for one in (search.chosen, *best, *families, *search.finals)}
    own = found.pop(str(search.chosen.choices))
    rest = sorted(found.values(), key=lambda one: one.predicted_s)
    return [asdict(one) for one in (own, *rest)]
