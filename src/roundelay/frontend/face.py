"""The face of a model towards export: flat tensor leaves in, flat tensor leaves out.

Export understands only registered containers, but models return others (a transformer's key-value cache). The face
takes the call's tensors as a flat list, calls the model exactly as the person would, and keeps of the result the
tensors that sit in known containers; everything else is remembered as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundelay.errors import JobError
from roundelay.frontend.unseen import refuse_own_backwards, refusing_draws, refusing_tensor_hooks

Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


def default_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called when the job does not say: all of a tuple but its last, or all of a mapping.

    Raises:
        JobError: the batch is neither.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), {}
    raise JobError(
        "the batch",
        got=f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""),
        expected="a mapping of tensors, or a tuple or list of at least two tensors",
        remedy="Give Job(inputs=...) to say how the model is called.",
    )


@dataclass(frozen=True, slots=True)
class CallShape:
    """How one call of the model is laid out: its container, and the leaves that are not tensors.

    Args:
        spec: pytree of (args, kwargs).
        constants: leaf index to the constant that stands there.
    """

    spec: pytree.TreeSpec
    constants: dict[int, Any]

    @staticmethod
    def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], CallShape]:
        """Tensor leaves of a call, in order, and the rest of it."""
        if not kwargs and {*map(type, args)} <= {torch.Tensor}:
            return list(args), _plain(len(args))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
        return tensors, CallShape(spec, constants)

    def unflatten(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call again, from its tensor leaves."""
        rest = iter(tensors)
        leaves = [self.constants[i] if i in self.constants else next(rest) for i in range(self.spec.num_leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def matches(self, other: CallShape) -> bool:
        """Whether two calls differ in their tensors only."""
        return self is other or (self.spec == other.spec and self.differing(other) is None)

    def differing(self, other: CallShape) -> tuple[str, Any, Any] | None:
        """A leaf of two calls of the same layout that is no tensor and not the same: its name, here and there."""
        if self is other or self.spec != other.spec:
            return None
        for i in sorted({*self.constants, *other.constants}):
            one, two = self.constants.get(i, _TENSOR), other.constants.get(i, _TENSOR)
            if not _same(one, two):
                return self.named(i), one, two
        return None

    def named(self, place: int) -> str:
        """What a leaf is called, for people: ``argument 1``, ``argument 'scale'``."""
        args, kwargs = pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec)
        for name, part in (*enumerate(args), *kwargs.items()):
            if place in pytree.tree_leaves(part):
                return f"argument {name!r}"
        return f"leaf {place}"


class _Tensor:
    """Stands for a tensor where a call had something else before."""

    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()


def _same(one: Any, two: Any) -> bool:
    """Whether two leaves that are no tensors are the same: 1, 1.0 and True are not."""
    if one is two:
        return True
    try:
        return type(one) is type(two) and bool(one == two or (one != one and two != two))
    except Exception:  # the person's own kind, or one that compares item by item
        return False


@cache
def _plain(count: int) -> CallShape:
    """The layout of so many tensors by position, which most models are called with."""
    return CallShape(pytree.tree_structure(((0,) * count, {})), {})


@dataclass(frozen=True, slots=True)
class OutputShape:
    """How the model's result is laid out.

    Args:
        spec: pytree of the result.
        rest: leaf index to a leaf that is no tensor (a number, None, a cache object).
    """

    spec: pytree.TreeSpec
    rest: dict[int, Any]

    def unflatten(self, tensors: Mapping[int, Any]) -> Any:
        """The result again; ``tensors`` maps the index among tensor leaves to the leaf."""
        if self.spec.is_leaf() and not self.rest:  # a model that returns a tensor, as most do
            return tensors[0]
        leaves, seen = [], 0
        for i in range(self.spec.num_leaves):
            if i in self.rest:
                leaves.append(self.rest[i])
            else:
                leaves.append(tensors[seen])
                seen += 1
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def num_tensors(self) -> int:
        """Number of tensor leaves."""
        return self.spec.num_leaves - len(self.rest)


class Opaque:
    """Stands for an output that cannot cross stages; touching it is told, not guessed at."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise _unseen(f"attribute {name!r} of {self._what}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Opaque)]
        raise _unseen(found[0]._what)

    def _used(self, *_: Any) -> Any:
        raise _unseen(self._what)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _used
    __neg__ = __abs__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = _used
    __len__ = __getitem__ = __contains__ = __hash__ = _used


def _unseen(what: str) -> JobError:
    return JobError(
        what,
        got="a use of it in the loss",
        expected="only tensors that the loss was seen to read on the first batch",
        remedy="Let the loss read the same tensors for every batch; numbers of the batch must come as tensors.",
    )


class _Seen:
    """Survives export, which puts a module's own attributes back as they were."""

    def __init__(self) -> None:
        self.shape: OutputShape | None = None


class Face(torch.nn.Module):
    """Wraps the model for export; see the module's docstring."""

    def __init__(self, model: torch.nn.Module, call: CallShape) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._seen = _Seen()

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        """Call the model as the person would; return the tensor leaves of its result."""
        args, kwargs = self._call.unflatten(list(leaves))
        with refusing_draws(), refusing_tensor_hooks():
            result = self.model(*args, **kwargs)
        results, spec = _flat(result)
        refuse_own_backwards(leaf for leaf in results if isinstance(leaf, torch.Tensor))
        rest = {i: _harmless(leaf) for i, leaf in enumerate(results) if not isinstance(leaf, torch.Tensor)}
        self._seen.shape = OutputShape(spec, rest)
        return [leaf for leaf in results if isinstance(leaf, torch.Tensor)]

    @property
    def output_shape(self) -> OutputShape | None:
        """Layout of the last result, or None before the first call."""
        return self._seen.shape


def _flat(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and layout of a result; dataclasses are made known to pytree where they are met."""
    leaves, spec = pytree.tree_flatten(result)
    made = [leaf for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)]
    new = {type(leaf) for leaf in made if all(field.init for field in fields(leaf))}
    for kind in new:
        pytree.register_dataclass(kind)
    return _flat(result) if new else (leaves, spec)


def _harmless(leaf: Any) -> Any:
    return (
        leaf
        if leaf is None or isinstance(leaf, (bool, int, float, str))
        else Opaque(f"an output of type {type(leaf).__name__}")
    )
