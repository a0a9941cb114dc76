"""The face of a model towards export: flat tensor leaves in, flat tensor leaves out.

Export understands only registered containers, but models return others (a transformer's key-value cache). The face
takes the call's tensors as a flat list, calls the model exactly as the person would, and keeps of the result the
tensors that sit in known containers; everything else is remembered as it was.

What the forward changes beside is part of its result, too. A buffer that it replaces (``self.n = self.n + 1``) is
written into the first one's memory, which a graph can say. Tensors that it leaves in attributes, dicts and lists, of
which a loss may read (a balance loss of experts, features that a hook keeps), follow the result's; the places are put
back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundelay.errors import CaptureError, JobError
from roundelay.frontend.export_checks import refuse_own_backwards, refusing_draws, refusing_tensor_hooks
from roundelay.frontend.reachable_state import MISSING, Change, ReachableState, StateSlot, set_at
from roundelay.frontend.trace_guards import owners_of, traced_as_trained

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
        numbers: indices, among the tensor leaves, of numbers that sizes decide; they travel as tensors.
    """

    spec: pytree.TreeSpec
    rest: dict[int, Any]
    numbers: tuple[int, ...] = ()

    def unflatten(self, tensors: Mapping[int, Any]) -> Any:
        """The result again; ``tensors`` maps the index among tensor leaves to the leaf."""
        if self.spec.is_leaf() and not self.rest:  # a model that returns a tensor, as most do
            return tensors[0]
        leaves, seen = [], 0
        for i in range(self.spec.num_leaves):
            if i in self.rest:
                leaves.append(self.rest[i])
            else:
                leaf = tensors[seen]
                leaves.append(int(leaf) if seen in self.numbers and isinstance(leaf, torch.Tensor) else leaf)
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


@dataclass(frozen=True, slots=True)
class Left:
    """A slot in which a forward has left tensors, and how they are laid out there."""

    slot: StateSlot
    shape: OutputShape


class Unready(Exception):
    """A forward has set buffers that were None: the first call is unlike all others, and must have been before."""


@dataclass(slots=True)
class Seen:
    """What one call has shown; it survives export, which puts a module's own attributes back as they were.

    Args:
        shape: layout of the result; None before the first call.
        left: where tensors were left beside it, in the order of their leaves behind the result's.
        changed: every slot that the forward changes, buffers apart, and what was there before.
        replaced: names of buffers that it replaces.
    """

    shape: OutputShape | None = None
    left: tuple[Left, ...] = ()
    changed: tuple[Change, ...] = ()
    replaced: tuple[str, ...] = ()


Roots = Sequence[tuple[str, Any]]
"""From where what a forward changes is looked for: a name for people, and a module or a function."""


class ExportAdapter(torch.nn.Module):
    """Wraps the model for export; see the module's docstring."""

    def __init__(self, model: torch.nn.Module, call: CallShape, roots: Roots = ()) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._roots = tuple(roots) or (("model", model),)
        self._owners = owners_of(model)
        self.seen = Seen()

    def forward(self, *leaves: torch.Tensor) -> list[torch.Tensor]:
        """Call the model as the person would; return the tensor leaves of its result, then those left elsewhere."""
        args, kwargs = self._call.unflatten(list(leaves))
        world = ReachableState(self._roots)
        try:
            with refusing_draws(), refusing_tensor_hooks(), traced_as_trained(self._owners):
                result = self.model(*args, **kwargs)
                changes = world.changes()
                self.seen.replaced = _write_buffers(changes)
        finally:
            world.restore()
        _refuse_parameters(changes)
        return self._taken(result, [change for change in changes if change.slot.kind not in ("buffer", "parameter")])

    def _taken(self, result: Any, changes: list[Change]) -> list[torch.Tensor]:
        """Tensor leaves of the result and of what was left, with their layouts noted."""
        results, self.seen.shape = _laid_out(result, numbers=True)
        left = []
        for change in changes:
            values = list(change.after) if change.slot.kind == "contents" else change.after
            tensors, shape = _laid_out(values)
            if tensors and change.slot.kind != "state":
                left.append(Left(change.slot, shape))
                results += tensors
        refuse_own_backwards(results)
        self.seen.left, self.seen.changed = tuple(left), tuple(changes)
        return results

    @property
    def output_shape(self) -> OutputShape | None:
        """Layout of the last result, or None before the first call."""
        return self.seen.shape


def _write_buffers(changes: Sequence[Change]) -> tuple[str, ...]:
    """Write what buffers were replaced with into those that there were; returns their names for people.

    Raises:
        Unready: there was none.
        CaptureError: it is of another size or kind.
    """
    changed = [change for change in changes if change.slot.kind == "buffer"]
    if any(change.before in (None, MISSING) for change in changed if not isinstance(change.before, torch.Tensor)):
        raise Unready
    values = []
    for change in changed:
        old, new = change.before, change.after
        if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
            raise _other_buffer(change)
        values.append(new.detach())  # all of them first: two buffers may change places
    for change, value in zip(changed, values, strict=True):
        change.before.copy_(value)
    return tuple(change.slot.path for change in changed)


def _refuse_parameters(changes: Sequence[Change]) -> None:
    """Refuse a forward that replaces parameters.

    Raises:
        CaptureError: it does.
    """
    for change in changes:
        if change.slot.kind == "parameter":
            where = set_at(change)
            made = change.before in (None, MISSING) if not isinstance(change.before, torch.Tensor) else False
            raise CaptureError(
                f"parameter {change.slot.path!r}, which the forward {'makes' if made else 'replaces'}"
                f"{', ' + where if where else ''}",
                got="a parameter that no optimizer has been given" if made else "another tensor in its place",
                expected="parameters that __init__ makes, and that only the optimizer changes",
                remedy="Make it in __init__, or call the model once in job(), before Job(...) is made."
                if made
                else "Compute a new tensor under another name, or use torch.nn.utils.parametrize.",
            )


def _other_buffer(change: Change) -> CaptureError:
    def told(value: Any) -> str:
        return f"shape {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)

    where = set_at(change)
    return CaptureError(
        f"buffer {change.slot.path!r}, which the forward replaces{', ' + where if where else ''}",
        got=told(change.after),
        expected=f"{told(change.before)}, as before: a buffer has one size and one dtype",
        remedy="Register it in __init__ with the size and dtype that it will have.",
    )


def _laid_out(value: Any, *, numbers: bool = False) -> tuple[list[torch.Tensor], OutputShape]:
    """Tensor leaves of a value, and the rest of it; numbers that sizes decide as tensors, if that is asked for."""
    leaves, spec = _flat(value)
    sizes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt)] if numbers else []
    leaves = [torch.scalar_tensor(leaf, dtype=torch.int64) if i in sizes else leaf for i, leaf in enumerate(leaves)]
    rest = {i: _harmless(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    places = [i for i in range(len(leaves)) if i not in rest]
    order = tuple(k for k, i in enumerate(places) if i in sizes)
    return [leaves[i] for i in places], OutputShape(spec, rest, order)


def _flat(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and layout of a result; dataclasses and plain classes are made known to pytree where they are met."""
    leaves, spec = pytree.tree_flatten(result)
    new = {type(leaf) for leaf in leaves if _is_container(leaf)}
    for kind in new:
        if is_dataclass(kind) and all(field.init for field in fields(kind)):
            pytree.register_dataclass(kind)
        else:
            pytree.register_pytree_node(kind, _attributes, partial(_with_attributes, kind))
    return _flat(result) if new else (leaves, spec)


def _is_container(leaf: Any) -> bool:
    """Whether it is an object that holds tensors in its attributes, as a dataclass or an own class of results does."""
    if isinstance(leaf, (type, torch.Tensor, torch.nn.Module)) or not hasattr(leaf, "__dict__"):
        return False
    if is_dataclass(leaf) and all(field.init for field in fields(leaf)):
        return True
    return any(isinstance(value, torch.Tensor) for value in vars(leaf).values())


def _attributes(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    return list(vars(value).values()), tuple(vars(value))


def _with_attributes(kind: type, values: Any, names: Any) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(zip(names, values, strict=True))
    return made


def _harmless(leaf: Any) -> Any:
    return (
        leaf
        if leaf is None or isinstance(leaf, (bool, int, float, str))
        else Opaque(f"an output of type {type(leaf).__name__}")
    )
