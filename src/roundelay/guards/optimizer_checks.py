"""Refuses an optimizer that would update a stage's parameters, or parts of them, differently from the whole model's.

A stage's optimizer holds the stage's parameters alone. It differs if it computes something over all of them: a norm to
clip by, a trust ratio of the whole model, an estimate from all gradients (Prodigy's d), an average in a hook. Where a
worker has a part of a parameter, each element must be updated by itself: Adafactor's row and column means, LAMB's
norms and Muon's products are not. Torch's own optimizers are known, another is tried
(:mod:`roundelay.guards.optimizer_trial`). What is not shown to be so is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import JobError, PlanError, listed
from roundelay.frontend import Captured
from roundelay.frontend.export import gradient_hooks
from roundelay.guards.optimizer_trial import Sizes, Tensors, Trial, TrialOf, apart, hooks_of, try_in_child
from roundelay.job import Job, Named
from roundelay.runtime.optimizer.nested_state import same_value
from roundelay.runtime.optimizer.optimizer_side_effects import source_location
from roundelay.runtime.optimizer.optimizer_state import WHOLE
from roundelay.runtime.optimizer.optimizer_wrappers import all_optimizers
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, groups_of, needs_closure

LIMIT_S = 60.0
"""Seconds that the check may take; an optimizer that takes longer is not checked."""

MANY = 100_000
"""Elements in all, above which a stage's copies are corners of the parameters."""

CORNER = 24
"""Length of a corner in each dimension."""

MOST = 1 << 22
"""Elements of a copy of which a part is tried; of larger parameters the longest dimensions are halved."""

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""Of ``torch.optim``."""

_ROUNDING = 1e-4
"""Differences allowed, as a part of what the weight has moved: kernels round the tail of a vector otherwise."""


def is_ordinary(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer and its step are torch's own."""
    kind = type(optimizer)
    own = getattr(torch.optim, kind.__name__, None) is kind
    return own and len(all_optimizers(optimizer)) == 1 and not hooks_of(optimizer) and "step" not in vars(optimizer)


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
    if not always and is_ordinary(build_optimizer(job.optimizer, apart(named))):
        return

    def try_stages() -> None:
        with torch.compiler.set_stance("force_eager"):
            _try_stages(job, named, partition)

    try_in_child(try_stages, "trying the optimizer on each stage's parameters", LIMIT_S, lambda why: None)


def _of_model(model: torch.nn.Module) -> Tensors:
    """The model's parameters with gradients set for them, which a step can reach in a closure but must not read."""
    tensors = []
    for name, parameter in model.named_parameters():
        tensors.append((name, parameter.detach()))
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.01)
            tensors.append((name, parameter.grad))
    return tensors


def _try_stages(job: Job, named: Named, partition: Sequence[Sequence[str]]) -> None:
    every, forbidden = [name for names in partition for name in names], _of_model(job.model)
    sizes: list[Sizes] = [lambda shape: shape]  # for example one with a table of the whole shape
    if sum(p.numel() for _, p in named) > MANY:
        sizes.insert(0, lambda shape: [min(size, CORNER) for size in shape])
    for size in sizes:
        trials = TrialOf(job.optimizer, named, every, size, forbidden)
        whole = trials.run()
        if not whole.error:
            break
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
    again = trials.run()
    for k, names in enumerate(partition):
        if names:
            _compare(k, whole, again, trials.run(names))


def _compare(stage: int, whole: Trial, again: Trial, part: Trial) -> None:
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


def check_split(job: Job, named: Named, dims: Mapping[str, int]) -> None:
    """Refuse an optimizer that may update parts of parameters differently from the whole.

    Args:
        job: its optimizer.
        named: every parameter of the model; not changed.
        dims: in which dimension each parameter is split, for those that are, by name.

    Raises:
        JobError: naming the optimizer and the first such parameter.
    """
    found = needs_whole(job, named, dims)
    if found:
        why = next(iter(found.values()))
        raise JobError(
            f"Job(optimizer=...), {type(build_optimizer(job.optimizer, apart(named))).__name__}",
            got=f"{why}, for {listed(list(found))}: of {'it' if len(found) == 1 else 'each'} a worker has a part",
            expected="an optimizer that treats each element alone, as SGD and Adam do",
            remedy="Take such an optimizer, or leave out --tensor-parallel, --zero, or the plan's tables.",
        )


def needs_whole(job: Job, named: Named, dims: Mapping[str, int]) -> dict[str, str]:
    """Which of the split parameters an optimizer may update by parts differently from the whole, each with why.

    Arguments as of :func:`check_split`. Parameters of one shape, dtype and group are tried once.
    """
    if not dims:
        return {}
    own = apart(named)
    optimizer = build_optimizer(job.optimizer, own)
    if is_ordinary(optimizer) and type(optimizer).__name__ in ELEMENTWISE:
        return {}
    alike = _alike(optimizer, own, dims)

    def tried() -> dict[str, str]:
        with torch.compiler.set_stance("force_eager"):
            return _try_parts(job, named, {name: dims[name] for name in alike})

    def untried(why: str) -> dict[str, str]:
        return dict.fromkeys(alike, f"a step that could not be tried ({why})")

    found = try_in_child(tried, "trying the optimizer on parts of parameters", LIMIT_S, untried)
    return {other: found[name] for name, others in alike.items() if name in found for other in others}


def _alike(optimizer: torch.optim.Optimizer, named: Named, dims: Mapping[str, int]) -> dict[str, list[str]]:
    """One of the split parameters of each shape, dtype, group and dimension, with the names of all that are like it."""
    groups = {id(parameter): i for i, _, parameter in groups_of(optimizer)}
    first: dict[tuple[object, ...], list[str]] = {}
    for name, parameter in named:
        if name in dims and parameter.requires_grad:
            kind = (parameter.shape, parameter.dtype, groups.get(id(parameter)), dims[name])
            first.setdefault(kind, []).append(name)
    return {names[0]: names for names in first.values()}


def _try_parts(job: Job, named: Named, dims: Mapping[str, int]) -> dict[str, str]:
    """As :func:`needs_whole`, for some parameters that stand for all."""

    def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(dims[name], 0, max(1, tensor.shape[dims[name]] // 2)).contiguous()

    for sizes in (_shrunk, lambda shape: shape):  # the whole shape, if the step needs it
        trials = TrialOf(job.optimizer, named, list(dims), sizes)
        whole = trials.run()
        if not whole.error:
            break
    if whole.error:
        return dict.fromkeys(dims, f"a step that could not be tried: {whole.error}")
    found, again, parts = {}, trials.run(), trials.run(part=half)
    for name in dims:
        if name in whole.uneven:
            found[name] = f"a step that applies {whole.uneven[name]} to it"
        elif parts.error:
            found[name] = f"a step that fails on a part of it: {parts.error}"
        elif not _same(name, again, whole, lambda tensor: tensor):
            found[name] = "a step that does something else when it is repeated"
        elif not _same(name, parts, whole, lambda tensor: half(name, tensor)):  # noqa: B023  called at once
            found[name] = "another update where it has a part"
    return found


def _same(name: str, trial: Trial, whole: Trial, part: Any) -> bool:
    """Whether a copy has become what that part of the whole has, but for rounding."""
    one, other = trial.weights[-1][name], part(whole.weights[-1][name])
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    moved = (other - part(whole.before[name])).abs().max()
    allowed = _ROUNDING * moved + 4 * torch.finfo(one.dtype).eps * other.abs().max()
    return bool(((one - other).abs() <= allowed).all()) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _shrunk(shape: torch.Size) -> list[int]:
    sizes = list(shape)
    while sizes and torch.Size(sizes).numel() > MOST:
        longest = sizes.index(max(sizes))
        sizes[longest] //= 2
    return sizes


def refuse_hooks_on_parts(captured: Captured) -> None:
    """Refuse hooks on the gradients of parameters of which each holder has a part.

    Raises:
        PlanError: there is one.
    """
    split = {*captured.states, *(captured.sharding.parameters if captured.sharding is not None else ())}
    for name in gradient_hooks.hooks_of(captured.model).keys() & split:
        raise PlanError(
            f"parameter {name!r}",
            got="a hook on its gradient, of which each holder has a part",
            expected="a hook on a gradient that one holder has as a whole",
            remedy="Remove the hook, or leave out --tensor-parallel and --zero.",
        )


def check_sharing(job: Job, sharing: Mapping[str, Sequence[torch.nn.Parameter]]) -> None:
    """Refuse parameters that share memory, unless steps one after the other add up to one with the summed gradient.

    Args:
        job: its optimizer.
        sharing: by name of a parameter, later ones in its memory.

    Raises:
        JobError: naming both parameters and the optimizer.
    """
    named = list(job.model.named_parameters())
    names, optimizer = {id(p): n for n, p in named}, build_optimizer(job.optimizer, apart(named))
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if is_ordinary(optimizer) and isinstance(optimizer, torch.optim.SGD) and not decays:  # linear in the gradients
        return
    for name, others in sharing.items():
        other = names[id(others[0])]
        raise JobError(
            f"parameters {name!r} and {other!r}",
            got=f"two parameters that share memory, which {type(optimizer).__name__} steps one after the other",
            expected="one parameter under two names, whose gradients are added",
            remedy=f"Tie them as torch does: model.{other} = model.{name}, instead of an assignment to .data.",
        )


def _describe(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's class, with its hooks or the steps that are not torch's."""
    hooks = [f"{kind} {source_location(hook)}" for kind, hook in hooks_of(optimizer)]
    kinds = [type(part.optimizer) for part in all_optimizers(optimizer)]
    steps = [source_location(kind.step) for kind in kinds if getattr(torch.optim, kind.__name__, None) is not kind]
    return f"Job(optimizer=...), {kinds[0].__name__} with " + ", ".join(hooks or steps or ["its step"])


_PER_PARAMETER = "an optimizer that treats each parameter alone: every stage has its own, over its own parameters"


def _differs(trial: Trial, got: str) -> JobError:
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


def _reads_others(trial: Trial) -> JobError:
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


def _changes_outside(trial: Trial) -> JobError:
    return JobError(
        _describe(trial.optimizer),
        got=f"a step that changes {trial.outside[0].slot.path}, which is no part of the optimizer",
        expected="a step that changes only weights and the optimizer: the rest would differ between the workers' "
        "processes, and no checkpoint holds it",
        remedy="For an average of the weights use Job(ema=0.999) or --ema, which `evaluate` then gets; to watch the "
        "training use evaluate or on_update; keep anything else in optimizer.state or the groups.",
    )
