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
from roundelay.job import Named, OptimizerFactory, SchedulerFactory
from roundelay.runtime.optimizer_side_effects import ParameterSnapshot
from roundelay.runtime.optimizer_state import OptimizerState
from roundelay.runtime.optimizer_wrappers import all_groups, all_states


def build_optimizer(make: OptimizerFactory, named: Named) -> torch.optim.Optimizer:
    """The job's optimizer over all of ``named``.

    Raises:
        JobError: it is no optimizer, one whose step needs a closure, one of other parameters than ``named``, or the
            function has put hooks or gradients on the parameters, or changed them.
    """
    before = ParameterSnapshot(named)
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
    if any(id(parameter) not in given for _, _, group in all_groups(optimizer) for parameter in group["params"]):
        raise JobError(
            f"Job(optimizer=...), {type(optimizer).__name__}",
            got="a parameter that the function was not given, such as one of model.parameters()",
            expected="an optimizer over parameters of its argument: every stage trains parameters of its own",
            remedy="For example: optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4).",
        )
    before.check()
    _unshare(optimizer)
    if switches(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _unshare(optimizer: torch.optim.Optimizer) -> None:
    """Give the groups tensors of their own: schedulers write into a learning rate that is one, of every optimizer."""
    own: dict[int, torch.Tensor] = {}
    for _, _, group in all_groups(optimizer):
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                group[key] = own.setdefault(id(value), value.detach().clone())


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
    for _, _, group in all_groups(optimizer):
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
        if "param_names" in group:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


@contextlib.contextmanager
def no_group_empty(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it steps, a group of which this stage has nothing holds a parameter of no size, and without a gradient.

    In plain PyTorch no group is empty, and optimizers look at a group's first parameter.
    """
    empty = [group for _, _, group in all_groups(optimizer) if not group["params"]]
    for group in empty:
        group["params"] = [_NOTHING]
    try:
        yield
    finally:
        for group in empty:
            group["params"] = []
        for _, state in all_states(optimizer):
            state.pop(_NOTHING, None)


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
        for _, state in all_states(self._optimizer):
            state.clear()
        self._kept = OptimizerState(self._optimizer, named)
        #: options of its groups, as the functions have made them
        self.made_with = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        self._scheduler = stepped(made := build_scheduler(schedule, self._optimizer), numbers)
        #: whether the next epoch's rates wait for what an evaluation says
        self.waits = made is not self._scheduler
        self._kept.settle()
        self._rates: list[tuple[float, ...]] = [self._now()]

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler that every update steps."""
        return self._scheduler

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler says them, update by update; else they are what the optimizer's groups say."""
        return self._scheduler is not None

    def check(self) -> None:
        """Refuse rates and options that the person's program has changed by hand, in this optimizer.

        Raises:
            JobError: naming the option.
        """
        self._kept.check()

    def rates(self, group: int, update: int, count: int) -> tuple[float, ...]:
        """lr(update), lr(update+1), ... of a group: ``count`` of them."""
        return tuple(self.at(u)[group] for u in range(update, update + count))

    def at(self, update: int) -> tuple[float, ...]:
        """lr(update) of every group.

        Raises:
            JobError: as :meth:`check`; or the optimizer cannot step without gradients.
        """
        self.check()
        if self._scheduler is None:
            return self._rates[0]
        while len(self._rates) <= update:
            self._stand_still()
            with contextlib.suppress(ValueError):  # behind the end of a schedule of fixed length its last rate goes on
                self._scheduler.step()
            self._kept.settle()
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


def groups_of(optimizer: torch.optim.Optimizer) -> Sequence[tuple[int, dict[str, Any], torch.nn.Parameter]]:
    """(index of the group, the group, parameter) for every parameter."""
    return [(i, group, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
