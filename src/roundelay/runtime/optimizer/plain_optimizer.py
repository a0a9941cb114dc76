"""The job's optimizer and schedule as data, and factories made from data that do the same steps.

An optimizer is one of torch's classes, by name, with groups of options and parameters; a schedule is what it sets
before each update of the run. Both go through the code that a job's own functions go through
(:mod:`roundelay.runtime.optimizer_steps`)::

    plain = plain_optimizer(job.optimizer, job.scheduler, without_gradients(model), updates)
    data = encoded(plain)                                           bytes
    plain = decoded(data)                                           elsewhere: checked, as bytes from outside
    Job(..., optimizer=optimizer_of(plain), scheduler=scheduler_of(plain))

Where a parameter of a group is not among those that the optimizer is made for, it is left out: a machine that runs one
stage has no others.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, final

import msgspec
import torch
from msgspec import Meta
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import LRScheduler

from roundelay.errors import JobError
from roundelay.ir.plain_bytes import decoded_by
from roundelay.ir.plain_graph import LIMITS, Count, Limits, Name, refused
from roundelay.job import Named, OptimizerFactory, SchedulerFactory
from roundelay.runtime.optimizer.nested_state import same_value
from roundelay.runtime.optimizer.stage_optimizer import (
    build_optimizer,
    build_scheduler,
    narrow,
    no_group_empty,
    per_update_scheduler,
)

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop),
        *(torch.optim.ASGD, torch.optim.Adafactor),
    )
}
"""The optimizers that travel, by name."""

Option: TypeAlias = bool | int | float | Name | tuple[float | int | None, ...] | None
_OF_PARAMETERS = ("params", "param_names")


class PlainGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of an optimizer: options before the first update, names of parameters, and whether torch keeps these."""

    options: dict[Name, Option]
    names: tuple[Name, ...]
    named: bool


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value by number of the update: ``values[i]`` from update ``starts[i]`` on; the last one stays."""

    starts: Annotated[tuple[Count, ...], Meta(min_length=1)]
    values: tuple[Option, ...]

    def at(self, update: int) -> Option:
        """The value before an update."""
        return self.values[max(0, bisect_right(self.starts, update) - 1)]


class Scheduled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An option of a group that the schedule sets, and the number of its steps."""

    group: Count
    option: Name
    steps: Count


class PlainOptimizer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimizer and its schedule.

    Args:
        name: of the class, one of :data:`CLASSES`.
        groups: in their order.
        scheduled: what a schedule sets; None if the job has none.
        steps: the values that it sets; groups that are set alike share one.
    """

    name: Name
    groups: tuple[PlainGroup, ...]
    scheduled: tuple[Scheduled, ...] | None
    steps: tuple[Steps, ...]


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(PlainOptimizer)


def encoded(plain: PlainOptimizer) -> bytes:
    """The optimizer as bytes (msgpack)."""
    return _ENCODER.encode(plain)


def decoded(data: bytes, limits: Limits = LIMITS) -> PlainOptimizer:
    """The optimizer from bytes from outside, checked.

    Raises:
        PlanError: they are no such optimizer.
    """
    what = "an optimizer as data"
    if len(data) > limits.encoded_bytes:
        raise refused(what, f"{len(data):,} bytes", f"at most {limits.encoded_bytes:,}")
    plain = decoded_by(_DECODER.decode, data, what)
    if plain.name not in CLASSES:
        raise refused(what, f"{plain.name!r}", f"one of {', '.join(CLASSES)}")
    if not plain.groups or any({*_OF_PARAMETERS} & group.options.keys() for group in plain.groups):
        raise refused(what, "no groups, or parameters among their options", "groups of options")
    for steps in plain.steps:
        if len(steps.starts) != len(steps.values) or list(steps.starts) != sorted({*steps.starts}):
            raise refused(what, "a schedule out of order", "one value for each of ascending numbers")
    for one in plain.scheduled or ():
        if one.group >= len(plain.groups) or one.steps >= len(plain.steps):
            raise refused(what, f"a schedule of group {one.group}", f"one of {len(plain.groups)}")
        if one.option not in plain.groups[one.group].options:
            raise refused(what, f"a schedule of {one.option!r}", "an option of its group")
    return plain


def plain_optimizer(
    make: OptimizerFactory, schedule: SchedulerFactory | None, named: Named, updates: int
) -> PlainOptimizer:
    """The job's optimizer and schedule as data.

    Args:
        make: the job's optimizer function.
        schedule: the job's scheduler function, if it has one.
        named: every parameter of the model; not changed.
        updates: of the whole run.

    Raises:
        JobError: a part of it cannot travel; naming it. Or the functions cannot be used.
    """
    optimizer = build_optimizer(make, named)
    _check_plain(optimizer)
    names = {id(parameter): name for name, parameter in named}
    groups = tuple(
        PlainGroup(
            {key: _option(key, value) for key, value in group.items() if key not in _OF_PARAMETERS},
            tuple(names[id(parameter)] for parameter in group["params"]),
            "param_names" in group,
        )
        for group in optimizer.param_groups
    )
    plain = PlainOptimizer(type(optimizer).__name__, groups, None, ())
    _check_same(optimizer, optimizer_of(plain)(named), named)
    scheduler = build_scheduler(schedule, optimizer)
    if scheduler is not per_update_scheduler(scheduler, ()):
        raise _cannot_travel(
            "Job(scheduler=...)", "a ReduceLROnPlateau, whose rates depend on `evaluate`", "a schedule"
        )
    if scheduler is None:
        return plain
    narrow(optimizer, {}, named)  # without parameters a step costs nothing, and keeps no state
    scheduled, steps = _scheduled(optimizer, scheduler, groups, updates)
    return PlainOptimizer(plain.name, groups, scheduled, steps)


def optimizer_of(plain: PlainOptimizer) -> OptimizerFactory:
    """A function as ``Job(optimizer=...)`` takes it; names of parameters that it is not given are left out."""

    def make(named: Named) -> torch.optim.Optimizer:
        own, groups = dict(named), list[dict[str, Any]]()
        for group in plain.groups:
            pairs = [(name, own[name]) for name in group.names if name in own]
            pairs = pairs or [("", torch.nn.Parameter(torch.empty(0), requires_grad=False))]  # none may be empty now
            params: list[Any] = pairs if group.named else [parameter for _, parameter in pairs]
            groups.append({"params": params, **group.options})
        optimizer = _made(CLASSES[plain.name], groups)
        kept = {id(parameter) for parameter in own.values()}
        for one in optimizer.param_groups:
            one["params"] = [parameter for parameter in one["params"] if id(parameter) in kept]
            if "param_names" in one:
                one["param_names"] = [name for name in one["param_names"] if name in own]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
            del optimizer.state[parameter]
        return optimizer

    return make


def scheduler_of(plain: PlainOptimizer) -> SchedulerFactory | None:
    """A function as ``Job(scheduler=...)`` takes it; None if the job has no schedule."""
    return None if plain.scheduled is None else lambda optimizer: _TableScheduler(optimizer, plain)


@final
class _TableScheduler(LRScheduler):
    """Sets options of groups by the number of updates so far.

    Args:
        optimizer: made by :func:`optimizer_of`.
        plain: has the table.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain: PlainOptimizer) -> None:
        self._plain = plain
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The learning rate of every group; the other options are set here."""
        groups = self.optimizer.param_groups
        for one in self._plain.scheduled or ():
            groups[one.group][one.option] = self._plain.steps[one.steps].at(self.last_epoch)
        return [group["lr"] for group in groups]


def _made(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    known = inspect.signature(kind).parameters
    first = {key: value for key, value in groups[0].items() if key in known and key != "params"}
    make: Callable[..., torch.optim.Optimizer] = kind
    return make(groups, **first)


def _scheduled(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler, groups: Sequence[PlainGroup], updates: int
) -> tuple[tuple[Scheduled, ...], tuple[Steps, ...]]:
    """What a schedule sets before every update, found by running it ahead."""
    rows: dict[tuple[int, str], tuple[list[int], list[Option]]] = {
        (i, key): ([], []) for i, group in enumerate(groups) for key in group.options
    }
    for update in range(max(1, updates)):
        for (i, key), (starts, values) in rows.items():
            value = optimizer.param_groups[i].get(key)
            if not values or not _equal(values[-1], value):
                starts.append(update)
                values.append(_option(key, value))
        if update + 1 < updates:
            _advance(optimizer, scheduler)
    steps: dict[str, Steps] = {}  # by its words: 1 and 1.0 are not the same
    found = []
    for (i, key), (starts, values) in rows.items():
        if key == "lr" or len(values) > 1 or not _equal(values[0], groups[i].options[key]):
            one = Steps(tuple(starts), tuple(values))
            steps.setdefault(repr(one), one)
            found.append(Scheduled(i, key, list(steps).index(repr(one))))
    return tuple(found), tuple(steps.values())


def _advance(optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> None:
    with no_group_empty(optimizer), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the steps that torch has skipped
        optimizer.step()
    with contextlib.suppress(ValueError):  # a schedule of fixed length has ended: its last rate holds
        scheduler.step()


def _equal(one: Any, two: Any) -> bool:
    return type(one) is type(two) and bool(one == two)


def _option(key: str, value: Any) -> Option:
    """An option that can travel.

    Raises:
        JobError: it cannot.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # type: ignore[no-any-return]
    if type(value) in (tuple, list) and all(item is None or type(item) in (int, float) for item in value):
        return tuple(value)
    got = f"option {key!r} of type {type(value).__name__}"
    raise _cannot_travel("Job(optimizer=...)", got, "numbers, texts and pairs of numbers as options")


def _check_plain(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is more than a class of torch's with options."""
    kind = type(optimizer)
    what = f"Job(optimizer=...), {kind.__name__}"
    if CLASSES.get(kind.__name__) is not kind:
        raise _cannot_travel(what, f"a class of {kind.__module__}", f"one of {', '.join(CLASSES)} of torch.optim")
    everywhere = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    own = [hooks for key, hooks in vars(optimizer).items() if key.endswith("_hooks")]
    if any(own) or any(everywhere):
        raise _cannot_travel(what, "hooks on its steps", "no hooks")
    if "step" in vars(optimizer):
        raise _cannot_travel(what, "a step of its own", "the step of its class")


def _check_same(optimizer: torch.optim.Optimizer, again: torch.optim.Optimizer, named: Named) -> None:
    """Refuse an optimizer that differs from the one that is made from data."""
    what = f"Job(optimizer=...), {type(optimizer).__name__}"
    if other := sorted(vars(optimizer).keys() ^ vars(again).keys()):
        raise _cannot_travel(what, f"attribute {other[0]!r}", "what its class makes of its options")
    for one, two in zip(optimizer.param_groups, again.param_groups, strict=True):
        for key in one.keys() | two.keys():
            if key != "params" and _plain_mark(one.get(key)) != _plain_mark(two.get(key)):
                raise _cannot_travel(what, f"option {key!r}, {one.get(key)!r:.60}", f"{two.get(key)!r:.60}")
    for name, parameter in named:
        if not _same_state(optimizer.state.get(parameter, {}), again.state.get(parameter, {})):
            raise _cannot_travel(what, f"a state of {name!r} before the first step", "what its class begins with")


def _plain_mark(value: Any) -> Any:
    return tuple(value) if type(value) is list else (type(value), value)


def _same_state(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    return one.keys() == two.keys() and all(same_value(one[key], two[key]) for key in one)


def _cannot_travel(subject: str, got: str, expected: str) -> JobError:
    return JobError(
        subject,
        got=got,
        expected=f"{expected}: machines that join get data, and no Python",
        remedy="Use one of torch's optimizers with a schedule by number of the update; or train it without strangers, "
        "by `roundelay train`.",
    )
