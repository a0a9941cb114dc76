"""Checks that an optimizer with only a stage's parameters treats them as one with all parameters of the model does.

It does if it treats each parameter alone. It does not if it computes something over all of them: a norm to clip by, a
trust ratio of the whole model, an estimate from all gradients (Prodigy's d), an average in a hook. This cannot be read
from the object, so it is tried in a child process, on small copies of the parameters with random gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.optim import optimizer as of_torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.errors import JobError, RunError
from roundelay.job import Job, Named, OptimizerFactory
from roundelay.launching.forked_call import isolated
from roundelay.reach.reachable_state import Change, ReachableState
from roundelay.runtime.optimizer.nested_state import same_value
from roundelay.runtime.optimizer.optimizer_side_effects import source_location
from roundelay.runtime.optimizer.optimizer_state import WHOLE, OptimizerState
from roundelay.runtime.optimizer.optimizer_wrappers import all_optimizers
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, narrow, needs_closure, no_group_empty

LIMIT_S = 60.0
"""Seconds that the check may take; an optimizer that takes longer is not checked."""

MANY = 100_000
"""Elements in all, above which the copies are corners of the parameters, :data:`CORNER` long in each dimension."""

CORNER = 24

_SCALES = (0.01, 10.0, 1.0, 0.1, 3.0, 0.3, 1.0, 1.0)
"""Factor of each update's gradients: some are small, some large enough to be clipped."""

_NO_READING = ("_like", "new_")

Tensors = list[tuple[str, torch.Tensor]]
"""(name of the parameter, tensor)."""


def check_narrowing(job: Job, named: Named, partition: Sequence[Sequence[str]], *, always: bool = False) -> None:
    """Refuse an optimizer that updates a stage's parameters differently when it holds no others.

    torch's own optimizers without hooks are not checked: they treat each parameter alone.

    Args:
        job: its optimizer.
        named: every parameter of the model; not changed.
        partition: for each stage the names of its parameters.
        always: check torch's own, too.

    Raises:
        JobError: naming the optimizer or its hook, and the first parameter or state entry that differs, or what a
            hook changes outside of the optimizer.
    """
    optimizer = build_optimizer(job.optimizer, apart(named))
    if not always and is_ordinary(optimizer):
        return

    def try_in_child() -> None:
        with torch.compiler.set_stance("force_eager"):
            _try_stages(job.optimizer, named, partition, _of_model(job.model))

    if hasattr(os, "fork"):
        try:
            isolated(try_in_child, "trying the optimizer on each stage's parameters", limit_s=LIMIT_S, quiet=True)
        except RunError:  # it was killed, or took too long
            return
    else:
        with torch.random.fork_rng(devices=[]):
            _try_stages(job.optimizer, named, partition, [])


def _of_model(model: torch.nn.Module) -> Tensors:
    """The model's parameters with gradients set for them, which a step can reach in a closure but must not read."""
    tensors = []
    for name, parameter in model.named_parameters():
        tensors.append((name, parameter.detach()))
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.01)
            tensors.append((name, parameter.grad))
    return tensors


def apart(named: Named) -> Named:
    """New parameters in the memory of these, without their gradients and hooks."""
    return [(name, torch.nn.Parameter(p.detach(), p.requires_grad)) for name, p in named]


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


def is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer and its step are torch's own."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind
    return own and len(all_optimizers(optimizer)) == 1 and not hooks_of(optimizer) and "step" not in vars(optimizer)


@dataclass(slots=True)
class _Trial:
    """The results of some updates.

    Args:
        optimizer: that made them.
        weights: after each update, by name.
        kept: the optimizer's state after the last.
        read: a parameter of another stage that a step has read, and the operation; None if there is none.
        outside: what the steps have changed outside of the optimizer.
        error: what was raised; empty if nothing.
    """

    optimizer: torch.optim.Optimizer
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: tuple[str, str] | None = None
    outside: list[Change] = field(default_factory=list)
    error: str = ""


def _try_stages(make: OptimizerFactory, named: Named, partition: Sequence[Sequence[str]], forbidden: Tensors) -> None:
    corners = sum(p.numel() for _, p in named) > MANY
    every = [name for names in partition for name in names]
    whole = _try(make, named, every, every, corners, forbidden)
    if whole.error and corners:  # for example one with a table of the whole shape
        corners, whole = False, _try(make, named, every, every, False, forbidden)
    if whole.read is not None:
        raise _reads_others(whole)
    if "closure" in whole.error.lower():
        raise needs_closure(type(whole.optimizer).__name__, whole.error)
    if whole.error:  # it fails in the run as well, which reports it
        return
    if whole.outside:
        raise _changes_outside(whole)
    if len(partition) == 1:
        return
    again = _try(make, named, every, every, corners, forbidden)
    for k, names in enumerate(partition):
        if names:
            _compare(k, whole, again, _try(make, named, names, every, corners, forbidden))


def _compare(stage: int, whole: _Trial, again: _Trial, part: _Trial) -> None:
    """Raise the error for one stage's first difference, apart from what differs between two whole trials."""
    if part.read is not None:
        raise _reads_others(part)
    if part.error:
        raise _differs(part, f"a step that fails with the parameters of stage {stage} alone: {part.error}")
    for update, (ours, theirs, repeated) in enumerate(zip(part.weights, whole.weights, again.weights, strict=True)):
        for name, weight in ours.items():
            if same_value(theirs[name], repeated[name]) and not same_value(weight, theirs[name]):
                raise _differs(
                    part,
                    f"another {name!r} after {update + 1} updates if it holds the parameters of stage {stage} alone",
                )
    for name, entries in part.kept.items():
        for key, value in entries.items():
            expected, repeated_value = (trial.kept.get(name, {}).get(key) for trial in (whole, again))
            if same_value(expected, repeated_value) and not same_value(value, expected):
                what = f"its{key}" if name == WHOLE else f"{key!r} of {name!r}"
                raise _differs(part, f"another value of {what} if it holds the parameters of stage {stage} alone")


def _try(
    make: OptimizerFactory, named: Named, own: Sequence[str], every: Sequence[str], corners: bool, forbidden: Tensors
) -> _Trial:
    """Update copies by an optimizer narrowed to ``own``, with gradients for the parameters of ``every`` stage.

    A step may read neither the other copies nor the tensors in ``forbidden``.
    """
    copies = [(name, torch.nn.Parameter(_copy(p, corners), p.requires_grad)) for name, p in named]
    mine = {name: p for name, p in copies if name in set(own)}
    torch.manual_seed(0)
    trial = _Trial(build_optimizer(make, copies))
    kept = OptimizerState(trial.optimizer, copies)
    if len(own) < len(every):
        narrow(trial.optimizer, mine, copies)
    surroundings = _Outside(trial.optimizer, copies)
    others = _Others([*((name, p) for name, p in copies if name in set(every) - set(own)), *forbidden])
    try:
        for gradients in _gradients(copies, every):
            for name, parameter in mine.items():
                parameter.grad = gradients.get(name)
            with others, kept.stepping(), no_group_empty(trial.optimizer):
                trial.optimizer.step()
            trial.weights.append({name: p.detach().clone() for name, p in mine.items()})
        trial.kept = kept.entries(mine)
    except JobError:
        raise
    except Exception as error:  # the user's code
        trial.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    trial.read, trial.outside = others.read, surroundings.changes()
    return trial


def _copy(parameter: torch.Tensor, corners: bool) -> torch.Tensor:
    part = parameter.detach()
    part = part[tuple(slice(0, CORNER) for _ in part.shape)] if corners else part
    if part.is_meta:
        return torch.randn(part.shape).to(part.dtype) * 0.02
    return part.clone(memory_format=torch.contiguous_format)


def _gradients(copies: Named, every: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Each update's gradients of all trained parameters, in different orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    trained = [(name, p) for name, p in copies if p.requires_grad and name in set(every)]
    for scale in _SCALES:
        yield {
            name: (scale * 10.0 ** (i * 7 % 5 - 2) * torch.randn(p.shape, generator=generator)).to(p.dtype)
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
        self._own = {id(p) for _, p in copies}
        for part in all_optimizers(optimizer):
            _collect_ids(part.optimizer, self._own, 6)
        steps = [type(part.optimizer).step for part in all_optimizers(optimizer)]
        roots = [(kind, hook) for kind, hook in hooks_of(optimizer)] + [("step", step) for step in steps]
        self._optimizer = optimizer
        self._world = ReachableState(roots)
        self._written = self._versions()

    def changes(self) -> list[Change]:
        """What has changed since this object was made."""
        for part in all_optimizers(self._optimizer):
            _collect_ids(part.optimizer, self._own, 6)
        changes = [change for change in self._world.changes() if id(change.slot.holder) not in self._own]
        now = self._versions()
        for place, version in self._written.items():
            if now.get(place, version) != version:
                slot = self._world.slots[place]
                changes.append(Change(slot, None, slot.read()))
        return changes

    def _versions(self) -> dict[Any, int]:
        versions = {}
        for place, slot in self._world.slots.items():
            value = slot.read() if id(slot.holder) not in self._own else None
            if isinstance(value, torch.Tensor) and id(value) not in self._own and not value.is_inference():
                versions[place] = value._version
        return versions


def _collect_ids(value: Any, ids: set[int], depth: int) -> None:
    """Add the ids of an object and of all that it holds."""
    if depth and id(value) not in ids and not isinstance(value, (str, int, float, type(None))):
        ids.add(id(value))
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        held = list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []
        for item in [*inner, *held]:
            _collect_ids(item, ids, depth - 1)
        if hasattr(value, "__dict__"):
            ids.add(id(vars(value)))


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, with its hooks or the steps that are not torch's."""
    hooks = [f"{kind} {source_location(hook)}" for kind, hook in hooks_of(optimizer)]
    kinds = [type(part.optimizer) for part in all_optimizers(optimizer)]
    steps = [source_location(kind.step) for kind in kinds if getattr(torch.optim, kind.__name__, None) is not kind]
    return f"Job(optimizer=...), {kinds[0].__name__} with " + ", ".join(hooks or steps or ["its step"])


_PER_PARAMETER = "an optimizer that treats each parameter alone: every stage has its own, over its own parameters"


def _differs(trial: _Trial, got: str) -> JobError:
    has_pre_hook = any(kind == "step pre hook" for kind, _ in hooks_of(trial.optimizer))
    clip = "--clip global:NORM under a rule that flushes (1f1b, gpipe), --clip previous:NORM under another"
    return JobError(
        _describe(trial.optimizer),
        got=got,
        expected=_PER_PARAMETER,
        remedy=f"To clip by the norm of all gradients, leave the hook out and give {clip}; or train with --workers 1."
        if has_pre_hook
        else "If it computes one number of all parameters or gradients (a norm, an estimated rate), take an optimizer "
        f"that does not; to clip by the norm of all gradients give {clip}. Noise that a step draws may be added to the "
        "gradients of each parameter by a seed of its own (its name, its step). Or train with --workers 1.",
    )


def _reads_others(trial: _Trial) -> JobError:
    assert trial.read is not None
    name, operation = trial.read
    return JobError(
        _describe(trial.optimizer),
        got=f"a step that reads {name!r}, or its gradient, which it was not given (by {operation})",
        expected="one that reads only the stage's own: others are in other processes, and of other versions",
        remedy="To clip by the norm of all gradients give --clip global:NORM; for an average of the weights use "
        "Job(ema=0.999) or --ema, which `evaluate` then gets; else read optimizer.param_groups, which hold the stage's "
        "own parameters. What needs them all trains with --workers 1, and an optimizer that holds them all.",
    )


def _changes_outside(trial: _Trial) -> JobError:
    return JobError(
        _describe(trial.optimizer),
        got=f"a step that changes {trial.outside[0].slot.path}, which is no part of the optimizer",
        expected="a step that changes only weights and the optimizer: the rest would differ between the workers' "
        "processes, and no checkpoint holds it",
        remedy="For an average of the weights use Job(ema=0.999) or --ema, which `evaluate` then gets; to watch the "
        "training use evaluate or on_update; keep anything else in optimizer.state or the groups.",
    )
