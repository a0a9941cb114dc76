"""The person's optimizer, stage by stage.

The job's function is called with every parameter of the model, so that groups may be made by name or shape, and the
groups are then narrowed to the parameters of the stage. Group structure, and with it schedulers and settings, stays.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roundelay.errors import JobError
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.job import Named, OptimizerFactory, SchedulerFactory
from roundelay.runtime.nested import flattened, nested


def build_optimizer(make: OptimizerFactory, named: Named) -> torch.optim.Optimizer:
    """The job's optimizer over all of ``named``.

    Raises:
        JobError: it is no optimizer, one whose step needs a closure, or one of other parameters than ``named``.
    """
    try:
        optimizer = make(named)
    except Exception as error:  # the person's own code
        raise JobError(
            "Job(optimizer=...)",
            got=f"{type(error).__name__}: {error}",
            expected="a function of a list of (name, parameter) that returns a torch optimizer",
            remedy="For example: optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4).",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(
            "Job(optimizer=...)",
            got=f"a {type(optimizer).__name__}",
            expected="a torch.optim.Optimizer",
            remedy="For example: optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4).",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise JobError(
            f"optimizer {type(optimizer).__name__}",
            got="a step that needs a closure",
            expected="a step from gradients alone: a stage cannot evaluate the whole model again",
            remedy="Use an optimizer whose step needs no closure, such as torch.optim.SGD, Adam or AdamW.",
        )
    given = {id(parameter) for _, parameter in named}
    if any(id(parameter) not in given for group in optimizer.param_groups for parameter in group["params"]):
        raise JobError(
            f"Job(optimizer=...), {type(optimizer).__name__}",
            got="a parameter that the function was not given, such as one of model.parameters()",
            expected="an optimizer over parameters of its argument: every stage trains parameters of its own",
            remedy="For example: optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4).",
        )
    if switches(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def switches(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer (schedule-free) evaluates with other weights than it trains: it has ``train``, ``eval``."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def build_scheduler(make: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The job's scheduler.

    Raises:
        JobError: the function raises, or what it makes is no scheduler.
    """
    if make is None:
        return None
    try:
        scheduler: Any = make(optimizer)
    except Exception as error:  # the person's own code
        raise JobError(
            "Job(scheduler=...)",
            got=f"{type(error).__name__}: {error}",
            expected="a function of the optimizer that returns a torch learning-rate scheduler",
            remedy="For example: scheduler=lambda optimizer: LambdaLR(optimizer, lambda update: 0.99**update).",
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise JobError(
            "Job(scheduler=...)",
            got=f"a {type(scheduler).__name__}",
            expected="a torch.optim.lr_scheduler.LRScheduler, or a ReduceLROnPlateau",
            remedy="For example: scheduler=lambda optimizer: LambdaLR(optimizer, lambda update: 0.99**update).",
        )
    return scheduler


def stepped(scheduler: LRScheduler | None, numbers: Sequence[float]) -> LRScheduler | None:
    """The scheduler that every update steps, if one does; one that waits for numbers has been stepped with these.

    Args:
        scheduler: the job's, as it was made.
        numbers: what evaluations have said so far, one for each epoch.
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    for number in numbers:
        scheduler.step(number)
    return None


def narrow(optimizer: torch.optim.Optimizer, own: Mapping[str, torch.nn.Parameter], named: Named) -> None:
    """Keep of each group the parameters in ``own``; groups stay, also when nothing of theirs is left.

    Args:
        optimizer: over all of ``named``.
        own: the stage's parameters by name.
        named: what the optimizer was made of.
    """
    kept = {id(parameter) for parameter in own.values()}
    names = {id(parameter): name for name, parameter in named}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
        if "param_names" in group:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


@contextlib.contextmanager
def no_group_empty(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it steps, a group of which this stage has nothing holds a parameter of no size, and without a gradient.

    In plain PyTorch no group is empty, and optimizers look at a group's first parameter.
    """
    empty = [group for group in optimizer.param_groups if not group["params"]]
    for group in empty:
        group["params"] = [_NOTHING]
    try:
        yield
    finally:
        for group in empty:
            group["params"] = []
        optimizer.state.pop(_NOTHING, None)


_NOTHING = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class RateTable:
    """Learning rates of updates to come: lr(u) of every group, from a second optimizer and scheduler run ahead.

    Args:
        make: the job's optimizer.
        schedule: the job's scheduler.
        named: parameters to make them with; they are not touched.
        numbers: what evaluations have said, for a scheduler that waits for it: its rate stays until the next.

    Raises:
        JobError: the optimizer or the scheduler cannot be used.
    """

    def __init__(
        self,
        make: OptimizerFactory,
        schedule: SchedulerFactory | None,
        named: Named,
        numbers: Sequence[float] = (),
    ) -> None:
        self._optimizer = build_optimizer(make, named)
        #: what kind of optimizer it is, and what kinds that is
        self.kinds = tuple(kind.__name__ for kind in type(self._optimizer).__mro__[:-2])
        narrow(self._optimizer, {}, named)  # groups alone: a step ahead costs nothing, and no state is held
        self._optimizer.state.clear()
        self._scheduler = stepped(made := build_scheduler(schedule, self._optimizer), numbers)
        #: whether the next epoch's rates wait for what an evaluation says
        self.waits = made is not self._scheduler
        self._rates: list[tuple[float, ...]] = [self._now()]

    def rates(self, group: int, update: int, count: int) -> tuple[float, ...]:
        """lr(update), lr(update+1), ... of a group: ``count`` of them."""
        return tuple(self.at(u)[group] for u in range(update, update + count))

    def at(self, update: int) -> tuple[float, ...]:
        """lr(update) of every group."""
        if self._scheduler is None:
            return self._rates[0]
        while len(self._rates) <= update:
            self._stand_still()
            with contextlib.suppress(ValueError):  # behind the end of a schedule of fixed length its last rate goes on
                self._scheduler.step()
            self._rates.append(self._now())
        return self._rates[update]

    def _stand_still(self) -> None:
        """Let an update pass without gradients: it changes nothing, but the scheduler wants to see it first."""
        try:
            with no_group_empty(self._optimizer):
                self._optimizer.step()
        except Exception as error:  # the person's own code
            raise JobError(
                f"Job(optimizer=...), {type(self._optimizer).__name__}, beside a scheduler",
                got=f"{type(error).__name__} in a step without gradients: {error}",
                expected="a step that leaves parameters alone whose grad is None: the schedule is run ahead with it",
                remedy="Skip such parameters in step(), as torch's own optimizers do, or give no scheduler.",
            ) from error

    def _now(self) -> tuple[float, ...]:
        return tuple(_rate(self._optimizer, group) for group in self._optimizer.param_groups)


def _rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """A group's learning rate.

    Raises:
        JobError: it has none that is a number.
    """
    try:
        return float(group["lr"])
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"Job(optimizer=...), {type(optimizer).__name__}",
            got=f"a parameter group with lr = {group.get('lr', 'nothing')!r:.80}",
            expected="a number: curves show it, schedulers change it, and weights are predicted with it",
            remedy="Give the optimizer a learning rate, for example lr=3e-4.",
        ) from error


def without_gradients(model: torch.nn.Module) -> Named:
    """The model's parameters as objects of their own, which share the weights but no gradient."""
    return [(n, torch.nn.Parameter(p.detach(), p.requires_grad)) for n, p in model.named_parameters()]


def state_of(optimizer: torch.optim.Optimizer, own: Mapping[str, torch.nn.Parameter]) -> dict[str, dict[str, Any]]:
    """A copy of the optimizer's state by parameter name, on the CPU, with nothing nested in it.

    Raises:
        JobError: the state is of a kind that cannot be kept.
    """
    copies: dict[str, dict[str, Any]] = {}
    for name, parameter in own.items():
        state = optimizer.state.get(parameter)
        if state:
            flat = flattened(state)
            copies[name] = {k: v.to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in flat.items()}
    return copies


def restore_state(
    optimizer: torch.optim.Optimizer, own: Mapping[str, torch.nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Put a copy of a saved state into the optimizer, each tensor where the optimizer itself would have made it."""
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in own.items():
        if name not in state:
            continue
        group = groups.get(id(parameter), {})
        counted_there = bool(group.get("fused") or group.get("capturable"))
        flat = {
            k: v.to(parameter.device if k != "step" or counted_there else v.device, copy=True)
            if isinstance(v, torch.Tensor)
            else v
            for k, v in flattened(state[name]).items()
            if k not in (EMA, EVALUATED)
        }
        if flat:  # else it has made no step: an optimizer makes its state with the first
            optimizer.state[parameter] = nested(flat)


def groups_of(optimizer: torch.optim.Optimizer) -> Sequence[tuple[int, dict[str, Any], torch.nn.Parameter]]:
    """(index of the group, the group, parameter) for every parameter."""
    return [(i, group, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
