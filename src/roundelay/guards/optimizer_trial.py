"""Tries a job's optimizer on copies of parameters: of all, of a stage's alone, or of parts of them.

Whether an optimizer treats each parameter, or each element, alone cannot be read from the object. So it makes some
updates with random gradients, in a child process, and what comes of fewer parameters or of parts is compared with what
comes of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch.optim import optimizer as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.errors import JobError, RunError
from roundelay.guards.elementwise_updates import ElementwiseWatch
from roundelay.job import Named, OptimizerFactory
from roundelay.launching.forked_call import isolated
from roundelay.reach.reachable_state import Change, ReachableState
from roundelay.runtime.optimizer.optimizer_state import OptimizerState
from roundelay.runtime.optimizer.optimizer_wrappers import all_optimizers
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, narrow, no_group_empty

UPDATES = 12
_SCALES = (0.01, 10.0, 1.0, 0.1, 3.0, 0.3)
"""Factor of each update's gradients, again and again: some are small, some large enough to be clipped."""

_NO_READING = ("_like", "new_")

_DEPTH = 6
"""Nesting in which an optimizer holds its own objects."""

Tensors = list[tuple[str, torch.Tensor]]
"""(name of the parameter, tensor)."""

Sizes = Callable[[torch.Size], Sequence[int]]
"""Shape of a parameter to the shape of the corner of it that is copied."""

PartOf = Callable[[str, torch.Tensor], torch.Tensor]
"""Name of a parameter, and its copy or its gradient, to what a holder has of it."""

Result = TypeVar("Result")


def try_in_child(call: Callable[[], Result], what: str, limit_s: float, otherwise: Callable[[str], Result]) -> Result:
    """What a call returns that runs the person's code, in a child process where there are any; its state is lost.

    Args:
        call: returns plain data.
        what: what it does, for messages.
        limit_s: seconds that it may take.
        otherwise: why it was killed or too slow, to what is returned then.

    Raises:
        RoundelayError: the call raised it.
    """
    if not hasattr(os, "fork"):
        with torch.random.fork_rng(devices=[]):
            return call()
    try:
        result: Result = isolated(call, what, limit_s=limit_s, quiet=True)
    except RunError as error:
        return otherwise(error.got)
    return result


def hooks_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Callable[..., Any]]]:
    """(``step pre hook`` or ``step post hook``, function) of every hook of its steps and of wrapped optimizers'."""
    hooks: list[tuple[str, Callable[..., Any]]] = []
    for kind, name, global_hooks in (
        ("step pre hook", "_optimizer_step_pre_hooks", of_torch._global_optimizer_pre_hooks),
        ("step post hook", "_optimizer_step_post_hooks", of_torch._global_optimizer_post_hooks),
    ):
        tables = [global_hooks, *(getattr(part.optimizer, name, None) or {} for part in all_optimizers(optimizer))]
        hooks += [(kind, hook) for table in tables for hook in table.values()]
    return hooks


def apart(named: Named) -> Named:
    """New parameters in the memory of these, without their gradients and hooks."""
    return [(name, torch.nn.Parameter(p.detach(), p.requires_grad)) for name, p in named]


@dataclass(slots=True)
class Trial:
    """The results of some updates.

    Args:
        optimizer: that made them.
        before: the copies that it holds, by name.
        weights: these after each update.
        kept: the optimizer's state after the last.
        uneven: by parameter, the first operation that shows no elementwise update, and its line.
        read: a parameter of another stage that a step has read, and the operation; None if there is none.
        outside: what the steps have changed outside of the optimizer.
        error: what was raised; empty if nothing.
    """

    optimizer: torch.optim.Optimizer
    before: dict[str, torch.Tensor]
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    uneven: dict[str, str] = field(default_factory=dict)
    read: tuple[str, str] | None = None
    outside: list[Change] = field(default_factory=list)
    error: str = ""


@final
@dataclass(frozen=True, slots=True)
class TrialOf:
    """What is tried.

    Args:
        make: the job's optimizer function.
        named: every parameter of the model; not changed.
        tried: names of those that get copies and gradients.
        sizes: of the copies.
        forbidden: tensors that no step may read.
    """

    make: OptimizerFactory
    named: Named
    tried: Sequence[str]
    sizes: Sizes
    forbidden: Tensors = field(default_factory=list)

    def run(self, held: Sequence[str] | None = None, part: PartOf = lambda name, tensor: tensor) -> Trial:
        """Update copies by an optimizer that holds some of them, and may not read the others.

        Args:
            held: names of those that it holds; None: all that are tried.
            part: what it has of each.
        """
        tried, own = set(self.tried), set(self.tried if held is None else held)
        draws = torch.Generator().manual_seed(0)
        copies = [(name, self._copy(name, p, part, draws) if name in tried else p) for name, p in apart(self.named)]
        mine = {name: p for name, p in copies if name in own}
        torch.manual_seed(0)
        trial = Trial(build_optimizer(self.make, copies), {name: p.detach().clone() for name, p in mine.items()})
        kept = OptimizerState(trial.optimizer, copies)
        narrow(trial.optimizer, mine, copies)
        outside, watch = _Outside(trial.optimizer, copies), ElementwiseWatch(mine)
        others = _Others([*((name, p) for name, p in copies if name in tried - own), *self.forbidden])
        try:
            for gradients in self._gradients(draws):
                for name, parameter in mine.items():
                    parameter.grad = part(name, gradients[name]).clone() if name in gradients else None
                    if parameter.grad is not None:
                        watch.follow(name, parameter.grad)
                with others, watch, kept.stepping(), no_group_empty(trial.optimizer):
                    trial.optimizer.step()
                trial.weights.append({name: p.detach().clone() for name, p in mine.items()})
            trial.kept = kept.entries(mine)
        except JobError:
            raise
        except Exception as error:  # the user's code
            trial.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        trial.read, trial.outside, trial.uneven = others.read, outside.changes(), watch.found
        return trial

    def _copy(self, name: str, parameter: torch.Tensor, part: PartOf, draws: torch.Generator) -> torch.nn.Parameter:
        shape = self.sizes(parameter.shape)
        if parameter.is_meta:
            corner = (torch.randn(shape, generator=draws) * 0.02).to(parameter.dtype)
        else:
            corner = parameter.detach()[tuple(slice(0, size) for size in shape)].contiguous()
        return torch.nn.Parameter(part(name, corner).clone(), parameter.requires_grad)

    def _gradients(self, draws: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
        """Each update's gradients of all trained parameters, in different orders of magnitude."""
        trained = [(name, p) for name, p in self.named if p.requires_grad and name in set(self.tried)]
        for update in range(UPDATES):
            scale = _SCALES[update % len(_SCALES)]
            yield {
                name: (scale * 10.0 ** (i * 7 % 5 - 2) * torch.randn(self.sizes(p.shape), generator=draws)).to(p.dtype)
                for i, (name, p) in enumerate(trained)
            }


@final
class _Others(TorchDispatchMode):
    """Records the first operation that reads or writes a parameter of another stage."""

    def __init__(self, others: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        readable = [(name, p) for name, p in others if p.numel() and p.layout is torch.strided and not p.is_meta]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in readable}
        self.read: tuple[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation unchanged."""
        name = func.name().removeprefix("aten::")
        if self._names and self.read is None and not func.is_view and not any(mark in name for mark in _NO_READING):
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    parameter = self._names.get(leaf.untyped_storage().data_ptr())
                    if parameter is not None:
                        self.read = parameter, name
        return func(*args, **(kwargs or {}))


@final
class _Outside:
    """The objects that hooks and the user's steps can reach and that are no part of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Named) -> None:
        self._parts, self._copies = [part.optimizer for part in all_optimizers(optimizer)], copies
        self._own = self._held()
        steps = [("step", type(part).step) for part in self._parts]
        self._world = ReachableState([*hooks_of(optimizer), *steps], torch.nn.ParameterList([p for _, p in copies]))

    def changes(self) -> list[Change]:
        """What has changed since this object was made."""
        own = self._own | self._held()
        return [change for change in self._world.changes() if id(change.slot.holder) not in own]

    def _held(self) -> set[int]:
        ids = {id(p) for _, p in self._copies}
        for part in self._parts:
            _collect_ids(part, ids, _DEPTH)
        return ids


def _collect_ids(value: Any, ids: set[int], depth: int) -> None:
    """Add the ids of an object and of all that it holds, but for what its functions can reach."""
    if depth and id(value) not in ids and not isinstance(value, (str, int, float, type(None))):
        ids.add(id(value))
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        held = list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []
        for item in [*inner, *held]:
            _collect_ids(item, ids, depth - 1)
        if hasattr(value, "__dict__"):
            ids.add(id(vars(value)))
