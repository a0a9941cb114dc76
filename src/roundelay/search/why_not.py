"""Why a plan is not another one: the best plan with what is asked for, beside it. No torch is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

from roundelay.errors import UsageError, did_you_mean, listed
from roundelay.ir import sbp
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import Plan
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.plan_options import Choices
from roundelay.search.search import Task, Tried, search, tried
from roundelay.search.space import space

_MADE: dict[type, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}
"""How a choice of a kind is made of its text; a name is the text itself."""

_SIZES = (
    "workers",
    "data_parallel",
    "tensor_parallel",
    "zero",
    "hybrid",
    "micro_batches",
    "recompute",
    "signatures",
    "stages",
)


def why_not(task: Task, plan: Plan, asked: str) -> Tried:
    """The best plan of the same rule that has what is asked for.

    Args:
        task: the model and where it will run.
        plan: the plan that does not have it.
        asked: ``zero=3``, a choice; or ``layers.0.up.weight=S(1)``, a parameter's signature on the plan's mesh.

    Raises:
        UsageError: it is neither.
        PlanError: there is no such plan.
    """
    name, equals, value = asked.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_") if equals else ""
    kinds = get_type_hints(Choices)
    own = inherited(plan, Choices())
    if name in {one.name for one in fields(Choices)}:
        pin = Choices(**{name: _converted(name, value.strip(), kinds[name])})
        free = replace(own, **dict.fromkeys((*_SIZES, "cuts", "devices", "threads", "backward", "predictor", "layout")))
        given = pin.over(replace(free, loss_scale=None, clip=own.clip))
        points = space(given, task.facts, task.machine, task.workers)
        if pin.memory_limit is not None:
            task = replace(task, memory=parse_bytes(pin.memory_limit, "--why-not"))
            points = space(replace(given, memory_limit=None), task.facts, task.machine, task.workers)
        return search(task, [one for one in points if pin.workers in (None, one.workers)]).best[0]
    return _with_signature(task, plan, own, asked)


def _with_signature(task: Task, plan: Plan, own: Choices, asked: str) -> Tried:
    """The plan with another signature of a parameter."""
    name, _, text = (part.strip() for part in asked.rpartition("="))
    known = task.facts.graph.parameters
    if name not in known or not plan.mesh:
        names = [one.name for one in fields(Choices)]
        raise UsageError(
            "--why-not",
            got=repr(asked) + (" for a plan without a mesh" if name in known else ""),
            expected=f"CHOICE=VALUE with one of {listed(names)}; or PARAMETER=SIGNATURE of a plan with a mesh",
            remedy=did_you_mean(name, [*names, *known]) + "For example --why-not zero=3.",
        )
    (axis,) = plan.mesh
    parameters = {**plan.parameters, name: ((axis, sbp.parse(text)),)}
    given = GivenSignatures(plan.mesh, parameters, plan.outputs)
    return tried(task, replace(own, signatures=given, tensor_parallel=None, cuts=None))


def _converted(name: str, value: str, kind: Any) -> Any:
    """A choice's value from its text."""
    known = get_args(kind)
    make = next((make for one, make in _MADE.items() if one in known and str not in known), str)
    try:
        return make(value)
    except (KeyError, ValueError) as error:
        expected = "true or false" if bool in known else "a number"
        raise UsageError(f"--why-not {name}", got=repr(value), expected=expected, remedy="Correct it.") from error
