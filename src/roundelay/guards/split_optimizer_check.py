"""Which parameters an optimizer updates by parts as it would update the whole.

Torch's own elementwise optimizers do. Of another this is tried, in a child process, on copies of the person's weights:
by the operations that its step applies (:mod:`roundelay.guards.elementwise_updates`), and by parts against the whole,
which shows what depends on a shape, or leaves torch. Parameters of one shape, dtype and group are tried once. What is
not shown is not so: Adafactor's row and column means, LAMB's norms, Muon's products, one number for all parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from roundelay.errors import JobError, RunError, listed
from roundelay.guards.elementwise_updates import ElementwiseWatch
from roundelay.guards.stage_optimizer_check import LIMIT_S, apart, is_ordinary
from roundelay.job import Job, Named
from roundelay.launching.forked_call import isolated
from roundelay.runtime.optimizer.stage_optimizer import build_optimizer, groups_of, narrow, no_group_empty

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""Of ``torch.optim``."""

MOST = 1 << 22
"""Elements of a copy; of larger parameters the longest dimensions are halved."""

UPDATES = 12
_SCALES = (0.01, 10.0, 1.0, 0.1, 3.0, 0.3)
"""Factors of the updates' gradients, again and again."""

_ROUNDING = 1e-4
"""Differences allowed, as a part of what the weight has moved: kernels round the tail of a vector otherwise."""

PartOf = Callable[[str, torch.Tensor], torch.Tensor]


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

    Arguments as of :func:`check_split`.
    """
    own = apart(named)
    optimizer = build_optimizer(job.optimizer, own)
    if not dims or (is_ordinary(optimizer) and type(optimizer).__name__ in ELEMENTWISE):
        return {}
    alike = _alike(optimizer, own, dims)

    def tried() -> dict[str, str]:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=[]):
            return _tried(job, named, {name: dims[name] for name in alike})

    if not hasattr(os, "fork"):
        found = tried()
    else:
        try:
            what = "trying the optimizer on parts of parameters"
            found = isolated(tried, what, limit_s=LIMIT_S, quiet=True)
        except RunError as error:  # it was killed, or took too long
            found = dict.fromkeys(alike, f"a step that could not be tried ({error.got})")
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


def _tried(job: Job, named: Named, dims: Mapping[str, int]) -> dict[str, str]:
    """As :func:`needs_whole`, for some parameters that stand for all."""

    def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(dims[name], 0, max(1, tensor.shape[dims[name]] // 2)).contiguous()

    for most in (MOST, None):  # one of the whole shape, if the step needs it
        whole = _Trial(job, named, dims, most)
        if not whole.error:
            break
    if whole.error:
        return dict.fromkeys(dims, f"a step that could not be tried: {whole.error}")
    found = dict(whole.watch.found)
    again, parts = _Trial(job, named, dims, most), _Trial(job, named, dims, most, half)
    for name in dims:
        if name in found:
            found[name] = f"a step that applies {found[name]} to it"
        elif parts.error:
            found[name] = f"a step that fails on a part of it: {parts.error}"
        elif not again.same(name, whole, lambda _, tensor: tensor):
            found[name] = "a step that does something else when it is repeated"
        elif not parts.same(name, whole, half):
            found[name] = "another update where it has a part"
    return found


class _Trial:
    """Some updates of copies of a few parameters.

    Args:
        job: its optimizer.
        named: every parameter.
        dims: the names of those that are copied.
        most: elements of a copy; None: of the parameter.
        part: of each copy and its gradients.
    """

    def __init__(
        self, job: Job, named: Named, dims: Mapping[str, int], most: int | None, part: PartOf | None = None
    ) -> None:
        generator, of_part = torch.Generator().manual_seed(0), part or (lambda name, tensor: tensor)
        shapes = {name: _shrunk(p.shape, most) for name, p in named if name in dims}
        copies = []
        for name, p in named:
            weight = p.detach()
            if name in dims:
                weight = of_part(name, _corner(weight, shapes[name], generator)).clone()
            copies.append((name, torch.nn.Parameter(weight, p.requires_grad)))
        own = {name: copy for name, copy in copies if name in dims}
        torch.manual_seed(0)
        optimizer = build_optimizer(job.optimizer, copies)
        narrow(optimizer, own, copies)
        #: what its steps do
        self.watch = ElementwiseWatch(own)
        #: what was raised; empty if nothing
        self.error = ""
        self.before = {name: p.detach().clone() for name, p in own.items()}
        try:
            for update in range(UPDATES):
                scale = _SCALES[update % len(_SCALES)]
                for name, p in own.items():
                    gradient = scale * torch.randn(shapes[name], generator=generator)
                    p.grad = of_part(name, gradient.to(p.dtype)).clone()
                    self.watch.follow(name, p.grad)
                with self.watch, no_group_empty(optimizer):
                    optimizer.step()
        except Exception as error:  # the user's code
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self.after = {name: p.detach() for name, p in own.items()}

    def same(self, name: str, whole: _Trial, part: PartOf) -> bool:
        """Whether a copy has become what that part of the whole has, but for rounding."""
        one, other = self.after[name], part(name, whole.after[name])
        moved = (other - part(name, whole.before[name])).abs().max()
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        allowed = _ROUNDING * moved + 4 * torch.finfo(one.dtype).eps * other.abs().max()
        return bool(((one - other).abs() <= allowed).all()) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _shrunk(shape: torch.Size, most: int | None) -> list[int]:
    sizes = list(shape)
    while most is not None and sizes and torch.Size(sizes).numel() > most:
        longest = sizes.index(max(sizes))
        sizes[longest] //= 2
    return sizes


def _corner(weight: torch.Tensor, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if weight.is_meta:
        return (torch.randn(shape, generator=generator) * 0.02).to(weight.dtype)
    return weight[tuple(slice(0, size) for size in shape)].contiguous()
