"""The job's optimizer and scheduler for one stage.

The job's function is called with every parameter of the model, so that it can make groups by name or shape; the groups
are then narrowed to the parameters of the stage. The group structure stays, and with it schedulers and options.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roundelay.errors import JobError
from roundelay.job import Named, OptimizerFactory, SchedulerFactory
from roundelay.runtime.optimizer.optimizer_side_effects import ParameterSnapshot
from roundelay.runtime.optimizer.optimizer_state import OptimizerState
from roundelay.runtime.optimizer.optimizer_wrappers import all_groups, all_optimizers, all_states


def build_optimizer(make: OptimizerFactory, named: Named) -> torch.optim.Optimizer:
    """The job's optimizer over all of ``named``.

    Raises:
        JobError: it is not an optimizer, needs a closure in its step, holds parameters that are not in ``named``, or
            the function has put hooks or gradients on the parameters, or changed them.
    """
    before = ParameterSnapshot(named)
    try:
        optimizer = make(named)
    except Exception as error:  # the user's code
        expected = "a function of a list of (name, parameter) that returns a torch optimizer"
        raise _no_optimizer("", f"{type(error).__name__}: {error}", expected) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _no_optimizer("", f"a {type(optimizer).__name__}", "a torch.optim.Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise needs_closure(type(optimizer).__name__)
    known = {id(parameter) for _, parameter in named}
    if any(id(parameter) not in known for _, _, group in all_groups(optimizer) for parameter in group["params"]):
        raise _no_optimizer(
            f", {type(optimizer).__name__}",
            "a parameter that the function was not given, such as one of model.parameters()",
            "an optimizer over parameters of its argument: every stage trains its own parameters",
        )
    before.check()
    _unshare(optimizer)
    if has_eval_mode(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def needs_closure(name: str, error: str = "") -> JobError:
    """The error for an optimizer whose step calls the model, by what it has raised without a closure, if anything."""
    return JobError(
        f"optimizer {name}",
        got=f"a step that needs a closure{f': {error}' if error else ''}",
        expected="a step from gradients alone: a stage cannot evaluate the whole model again",
        remedy="Use an optimizer whose step needs no closure, such as torch.optim.SGD, Adam or AdamW.",
    )


def _no_optimizer(which: str, got: str, expected: str) -> JobError:
    remedy = "For example: optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)."
    return JobError(f"Job(optimizer=...){which}", got=got, expected=expected, remedy=remedy)


def _unshare(optimizer: torch.optim.Optimizer) -> None:
    """Copy tensors in the groups: schedulers write in place into a learning rate that is a tensor."""
    own: dict[int, torch.Tensor] = {}
    for _, _, group in all_groups(optimizer):
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                group[key] = own.setdefault(id(value), value.detach().clone())


def has_eval_mode(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has ``train`` and ``eval``, as schedule-free ones, which evaluate with other weights."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def build_scheduler(make: SchedulerFactory | None, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The job's scheduler.

    Raises:
        JobError: the function raises, or what it returns is not a scheduler.
    """
    if make is None:
        return None
    try:
        scheduler: Any = make(optimizer)
    except Exception as error:  # the user's code
        expected = "a function of the optimizer that returns a torch learning-rate scheduler"
        raise _no_scheduler(f"{type(error).__name__}: {error}", expected) from error
    if not isinstance(scheduler, LRScheduler):
        expected = "a torch.optim.lr_scheduler.LRScheduler, or a ReduceLROnPlateau"
        raise _no_scheduler(f"a {type(scheduler).__name__}", expected)
    return scheduler


def _no_scheduler(got: str, expected: str) -> JobError:
    remedy = "For example: scheduler=lambda optimizer: LambdaLR(optimizer, lambda update: 0.99**update)."
    return JobError("Job(scheduler=...)", got=got, expected=expected, remedy=remedy)


def per_update_scheduler(scheduler: LRScheduler | None, numbers: Sequence[float]) -> LRScheduler | None:
    """The scheduler if every update steps it, else None: a ``ReduceLROnPlateau`` is stepped here with ``numbers``.

    Args:
        scheduler: the job's, newly made.
        numbers: results of the evaluations so far, one for each epoch.
    """
    if not isinstance(scheduler, ReduceLROnPlateau):
        return scheduler
    for number in numbers:
        scheduler.step(number)
    return None


def choose_alike(optimizer: torch.optim.Optimizer, devices: Iterable[str]) -> None:
    """Take torch's choice of an implementation by device away, where stages lie on devices of different kinds.

    torch updates many parameters in one call on a GPU, and one after the other on the CPU and where both are in one
    optimizer: with other last bits. Without a choice of the person's, here it is one after the other everywhere.
    """
    if len({name.partition(":")[0] for name in devices}) > 1:
        for group in (group for part in all_optimizers(optimizer) for group in part.optimizer.param_groups):
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = False


def narrow(optimizer: torch.optim.Optimizer, own: Mapping[str, torch.nn.Parameter], named: Named) -> None:
    """Keep in each group only the parameters in ``own``. Groups stay, also if they become empty.

    Args:
        optimizer: over all of ``named``.
        own: the stage's parameters by name.
        named: the parameters with which the optimizer was made.
    """
    kept = {id(parameter) for parameter in own.values()}
    names = {id(parameter): name for name, parameter in named}
    for _, _, group in all_groups(optimizer):
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in kept]
        if "param_names" in group:
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


@contextlib.contextmanager
def no_group_empty(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which every empty group holds one parameter of no elements and without a gradient.

    In plain PyTorch no group is empty, and some optimizers read a group's first parameter.
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
    """Learning rates of future updates: lr(u) of every group, from a second optimizer and scheduler that run ahead.

    Args:
        make: the job's optimizer function.
        schedule: the job's scheduler function.
        named: parameters to call them with; not changed.
        numbers: results of the evaluations so far, for a ``ReduceLROnPlateau``, whose rate changes only with the next.

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
        #: names of the optimizer's class and of its base classes
        self.kinds = tuple(kind.__name__ for kind in type(self._optimizer).__mro__[:-2])
        narrow(self._optimizer, {}, named)  # without parameters a step costs nothing, and keeps no state
        for _, state in all_states(self._optimizer):
            state.clear()
        self._kept = OptimizerState(self._optimizer, named)
        #: options of its groups before the first update
        self.group_options = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        scheduler = build_scheduler(schedule, self._optimizer)
        #: the scheduler that every update steps; None if there is none
        self.scheduler = per_update_scheduler(scheduler, numbers)
        #: whether the next epoch's rates depend on an evaluation
        self.waits = scheduler is not self.scheduler
        self._kept.accept_options()
        self._rates: list[tuple[float, ...]] = [self._now()]

    @property
    def scheduled(self) -> bool:
        """Whether a scheduler sets the rates update by update; else they are constant."""
        return self.scheduler is not None

    def check(self) -> None:
        """Refuse rates and options of this optimizer that the user's program has changed by hand.

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
        if self.scheduler is None:
            return self._rates[0]
        while len(self._rates) <= update:
            self._empty_step()
            with contextlib.suppress(ValueError):  # a schedule of fixed length has ended: its last rate holds
                self.scheduler.step()
            self._kept.accept_options()
            self._rates.append(self._now())
        return self._rates[update]

    def _empty_step(self) -> None:
        """Step the optimizer without gradients, which changes nothing: a scheduler expects it before its own step."""
        try:
            with no_group_empty(self._optimizer):
                self._optimizer.step()
        except Exception as error:  # the user's code
            raise JobError(
                f"Job(optimizer=...), {type(self._optimizer).__name__}, with a scheduler",
                got=f"{type(error).__name__} in a step without gradients: {error}",
                expected="a step that skips parameters whose grad is None: the schedule is run ahead with it",
                remedy="Skip such parameters in step(), as torch's own optimizers do, or use no scheduler.",
            ) from error

    def _now(self) -> tuple[float, ...]:
        return tuple(_rate(self._optimizer, group) for group in self._optimizer.param_groups)


def _rate(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """A group's learning rate.

    Raises:
        JobError: it is not a number.
    """
    try:
        return float(group["lr"])
    except (KeyError, TypeError, ValueError) as error:
        raise JobError(
            f"Job(optimizer=...), {type(optimizer).__name__}",
            got=f"a parameter group with lr = {group.get('lr', 'nothing')!r:.80}",
            expected="a number: curves show it, schedulers change it, and weight prediction uses it",
            remedy="Give the optimizer a learning rate, for example lr=3e-4.",
        ) from error


def without_gradients(model: torch.nn.Module) -> Named:
    """New parameters that share the memory of the model's, but not their gradients."""
    return [(n, torch.nn.Parameter(p.detach(), p.requires_grad)) for n, p in model.named_parameters()]


def groups_of(optimizer: torch.optim.Optimizer) -> Sequence[tuple[int, dict[str, Any], torch.nn.Parameter]]:
    """(index of the group, the group, parameter) for every parameter."""
    return [(i, group, p) for i, group in enumerate(optimizer.param_groups) for p in group["params"]]
