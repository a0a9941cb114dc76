"""Whether an optimizer narrowed to a stage's parameters does to them what it does beside all others.

It does where it treats each parameter alone. It does not where it computes something over all of them: a norm to clip
by, a trust ratio of the whole model, an estimate that all gradients enter (Prodigy's d), an average in a hook. That
cannot be seen by looking, so it is tried: on small copies, with made-up gradients, in a child.
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
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.job import Job, Named, OptimizerFactory
from roundelay.runtime.forked_call import isolated
from roundelay.runtime.optimizer_side_effects import place_of
from roundelay.runtime.optimizer_state import WHOLE, OptimizerState
from roundelay.runtime.optimizer_wrappers import parts
from roundelay.runtime.stage_optimizer import build_optimizer, narrow, no_group_empty

LIMIT_S = 60.0
"""Seconds that it may take in all; what takes longer is not looked at."""

MANY = 100_000
"""Elements of all parameters from which the copies are corners of them, :data:`CORNER` long in each dimension."""

CORNER = 24

_SCALES = (0.01, 10.0, 1.0, 0.1, 3.0, 0.3, 1.0, 1.0)
"""Of each update's gradients: small ones, and such as are clipped."""

_NO_READING = ("_like", "new_")

Tensors = list[tuple[str, torch.Tensor]]
"""Tensors by names of parameters."""


def check_narrowing(job: Job, named: Named, partition: Sequence[Sequence[str]], *, always: bool = False) -> None:
    """Refuse an optimizer that does something else to a stage's parameters where it has no others.

    Nothing is looked at where it is one of torch's own and has no hooks: each treats its parameters alone.

    Args:
        job: its optimizer.
        named: every parameter of the model; not touched.
        partition: for each stage the names of its parameters.
        always: look at torch's own, too.

    Raises:
        JobError: naming the optimizer or its hook, and the first parameter or entry that differs; or what a hook
            changes outside of the optimizer.
    """
    optimizer = build_optimizer(job.optimizer, _apart(named))
    if not always and _is_ordinary(optimizer):
        return

    def look() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # what the person's code prints
            os.dup2(nowhere, stream)
        with torch.compiler.set_stance("force_eager"):
            _look(job.optimizer, named, partition, _of_model(job.model))

    if hasattr(os, "fork"):
        try:
            isolated(look, "trying the optimizer on each stage's parameters", limit_s=LIMIT_S)
        except RunError:  # it was killed, or took too long
            return
    else:
        with torch.random.fork_rng(devices=[]):
            _look(job.optimizer, named, partition, [])


def _of_model(model: torch.nn.Module) -> Tensors:
    """The model's own parameters, with gradients, which a step may come by past its argument, and may not read."""
    found = []
    for name, parameter in model.named_parameters():
        found.append((name, parameter.detach()))
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.01)
            found.append((name, parameter.grad))
    return found


def _apart(named: Named) -> Named:
    return [(name, torch.nn.Parameter(p.detach(), p.requires_grad)) for name, p in named]


def hooks_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Callable[..., Any]]]:
    """(``step pre hook`` or ``step post hook``, function) of every hook around its steps, wrapped optimizers' too."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for kind, name, everyone in (
        ("step pre hook", "_optimizer_step_pre_hooks", of_torch._global_optimizer_pre_hooks),
        ("step post hook", "_optimizer_step_post_hooks", of_torch._global_optimizer_post_hooks),
    ):
        tables = [everyone, *(getattr(part.optimizer, name, None) or {} for part in parts(optimizer))]
        found += [(kind, hook) for table in tables for hook in table.values()]
    return found


def _is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that steps is torch's own."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind
    return own and len(parts(optimizer)) == 1 and not hooks_of(optimizer) and "step" not in vars(optimizer)


@dataclass(slots=True)
class _Trial:
    """What came of some updates.

    Args:
        weights: after each of them, by name.
        kept: what the optimizer keeps behind the last.
        read: a parameter of others that a step has read, and by which operation; empty if none.
        left: what it has changed outside of itself.
        failed: what it raised; empty if nothing.
    """

    optimizer: torch.optim.Optimizer
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: tuple[str, str] | None = None
    left: list[Change] = field(default_factory=list)
    failed: str = ""


def _look(make: OptimizerFactory, named: Named, partition: Sequence[Sequence[str]], past: Tensors) -> None:
    corners = sum(p.numel() for _, p in named) > MANY
    every = [name for names in partition for name in names]
    whole = _tried(make, named, every, every, corners, past)
    if whole.failed and corners:  # a table of the whole shape, for example
        corners, whole = False, _tried(make, named, every, every, False, past)
    if whole.read is not None:
        raise _reads(whole)
    if whole.failed:  # as it will be in the run, which then says so
        return
    if whole.left:
        raise _leaves(whole)
    if len(partition) == 1:
        return
    again = _tried(make, named, every, every, corners, past)
    for k, names in enumerate(partition):
        if names:
            _compare(k, whole, again, _tried(make, named, names, every, corners, past))


def _compare(stage: int, whole: _Trial, again: _Trial, part: _Trial) -> None:
    """Raise the error for what one stage's optimizer has done otherwise."""
    if part.read is not None:
        raise _reads(part)
    if part.failed:
        raise _otherwise(part, f"a step that fails with the parameters of stage {stage} alone: {part.failed}")
    for update, (ours, theirs, same) in enumerate(zip(part.weights, whole.weights, again.weights, strict=True)):
        for name, weight in ours.items():
            if _same(theirs[name], same[name]) and not _same(weight, theirs[name]):
                raise _otherwise(
                    part,
                    f"another {name!r} after {update + 1} updates where it has the parameters of stage {stage} alone",
                )
    for name, entries in part.kept.items():
        for key, value in entries.items():
            wanted, once_more = (trial.kept.get(name, {}).get(key) for trial in (whole, again))
            if _same(wanted, once_more) and not _same(value, wanted):
                what = f"its{key}" if name == WHOLE else f"{key!r} of {name!r}"
                raise _otherwise(part, f"another value of {what} where it has the parameters of stage {stage} alone")


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.shape == two.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(two))
    return type(one) is type(two) and (one == two or (one != one and two != two))


def _tried(
    make: OptimizerFactory, named: Named, own: Sequence[str], every: Sequence[str], corners: bool, past: Tensors
) -> _Trial:
    """Some updates of copies, by an optimizer narrowed to ``own``; those of ``every`` stage have gradients.

    Neither the copies of others may be read nor what is reached ``past`` the copies.
    """
    copies = [(name, torch.nn.Parameter(_copy(p, corners), p.requires_grad)) for name, p in named]
    mine = {name: p for name, p in copies if name in set(own)}
    torch.manual_seed(0)
    trial = _Trial(build_optimizer(make, copies))
    kept = OptimizerState(trial.optimizer, copies)
    if len(own) < len(every):
        narrow(trial.optimizer, mine, copies)
    outside = _Outside(trial.optimizer, copies)
    others = _Others([*((name, p) for name, p in copies if name in set(every) - set(own)), *past])
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
    except Exception as error:  # the person's own code
        trial.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    trial.read, trial.left = others.read, outside.changes()
    return trial


def _copy(parameter: torch.Tensor, corners: bool) -> torch.Tensor:
    part = parameter.detach()
    part = part[tuple(slice(0, CORNER) for _ in part.shape)] if corners else part
    if part.is_meta:
        return torch.randn(part.shape).to(part.dtype) * 0.02
    return part.clone(memory_format=torch.contiguous_format)


def _gradients(copies: Named, every: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Each update's gradients, of all that is trained; the parameters' are of unlike sizes."""
    draws = torch.Generator().manual_seed(0)
    trained = [(name, p) for name, p in copies if p.requires_grad and name in set(every)]
    for scale in _SCALES:
        yield {
            name: (scale * 10.0 ** (i * 7 % 5 - 2) * torch.randn(p.shape, generator=draws)).to(p.dtype)
            for i, (name, p) in enumerate(trained)
        }


@final
class _Others(TorchDispatchMode):
    """Hears when an operation reads or writes a parameter of another stage."""

    def __init__(self, others: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        readable = [(name, p) for name, p in others if p.numel() and p.layout is torch.strided and not p.is_meta]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in readable}
        self.read: tuple[str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it as it is."""
        name = func.name().removeprefix("aten::")
        if self._names and self.read is None and not func.is_view and not any(mark in name for mark in _NO_READING):
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    found = self._names.get(leaf.untyped_storage().data_ptr())
                    if found is not None:
                        self.read = found, name
        return func(*args, **(kwargs or {}))


@final
class _Outside:
    """What hooks and the person's own steps can reach that is no part of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, copies: Named) -> None:
        self._own = {id(p) for _, p in copies}
        for part in parts(optimizer):
            _gather(part.optimizer, self._own, 6)
        steps = [type(part.optimizer).step for part in parts(optimizer)]
        roots = [(kind, hook) for kind, hook in hooks_of(optimizer)] + [("step", step) for step in steps]
        self._optimizer = optimizer
        self._world = ReachableState(roots)
        self._written = self._versions()

    def changes(self) -> list[Change]:
        """What has changed since."""
        for part in parts(self._optimizer):
            _gather(part.optimizer, self._own, 6)
        found = [change for change in self._world.changes() if id(change.slot.holder) not in self._own]
        now = self._versions()
        for place, version in self._written.items():
            if now.get(place, version) != version:
                slot = self._world.slots[place]
                found.append(Change(slot, None, slot.read()))
        return found

    def _versions(self) -> dict[Any, int]:
        made = {}
        for place, slot in self._world.slots.items():
            value = slot.read() if id(slot.holder) not in self._own else None
            if isinstance(value, torch.Tensor) and id(value) not in self._own and not value.is_inference():
                made[place] = value._version
        return made


def _gather(value: Any, ids: set[int], deep: int) -> None:
    """The identities of an optimizer and of all that it holds."""
    if deep and id(value) not in ids and not isinstance(value, (str, int, float, type(None))):
        ids.add(id(value))
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        held = list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []
        for item in [*inner, *held]:
            _gather(item, ids, deep - 1)
        if hasattr(value, "__dict__"):
            ids.add(id(vars(value)))


def _who(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class with what the person has written of its step."""
    hooks = [f"{kind} {place_of(hook)}" for kind, hook in hooks_of(optimizer)]
    kinds = [type(part.optimizer) for part in parts(optimizer)]
    steps = [place_of(kind.step) for kind in kinds if getattr(torch.optim, kind.__name__, None) is not kind]
    return f"Job(optimizer=...), {kinds[0].__name__} with " + ", ".join(hooks or steps or ["its step"])


_ALONE = "an optimizer that treats each parameter alone: every stage has one of its own, over its own parameters"


def _otherwise(trial: _Trial, got: str) -> JobError:
    pre = any(kind == "step pre hook" for kind, _ in hooks_of(trial.optimizer))
    clip = "--clip global:NORM under a rule that flushes (1f1b, gpipe), --clip previous:NORM under another"
    return JobError(
        _who(trial.optimizer),
        got=got,
        expected=_ALONE,
        remedy=f"To clip by the norm of all gradients, leave the hook out and give {clip}; or train with --workers 1."
        if pre
        else "If it computes one number of all parameters or gradients (a norm, an estimated rate), take an optimizer "
        f"that does not; to clip by the norm of all gradients give {clip}. Noise that a step draws may be added to the "
        "gradients of each parameter by a seed of its own (its name, its step). Or train with --workers 1.",
    )


def _reads(trial: _Trial) -> JobError:
    assert trial.read is not None
    name, operation = trial.read
    return JobError(
        _who(trial.optimizer),
        got=f"a step that reads {name!r}, or its gradient, past the parameters that it was given (by {operation})",
        expected="one that reads the stage's own: others are elsewhere, and older",
        remedy="To clip by the norm of all gradients give --clip global:NORM; for an average of the weights use "
        "Job(ema=0.999) or --ema, which `evaluate` then gets; else go through optimizer.param_groups, which hold the "
        "stage's own parameters. What needs them all trains with --workers 1, and an optimizer that holds them all.",
    )


def _leaves(trial: _Trial) -> JobError:
    return JobError(
        _who(trial.optimizer),
        got=f"a step that changes {trial.left[0].slot.path}, which is no part of the optimizer",
        expected="a step that changes weights and the optimizer alone: every stage would change what is its own "
        "process's, and no checkpoint holds it",
        remedy="For an average of the weights use Job(ema=0.999) or --ema, which `evaluate` then gets; to look on "
        "while it trains use evaluate or on_update; keep anything else in optimizer.state or the groups.",
    )
