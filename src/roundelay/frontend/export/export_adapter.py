"""Adapt a model to ``torch.export``: flat tensor leaves in, flat tensor leaves out.

Export supports only registered containers, but models return others (a transformer's key-value cache). The adapter
takes the call's tensors as a flat list, calls the model exactly as the user would, and returns the tensors in known
containers of the result; all other leaves are stored as they are.

Side effects of the forward become part of its result. A buffer that it replaces (``self.n = self.n + 1``) is written
into the first one's memory, which a graph can express. Tensors that it leaves in attributes, dicts and lists, which a
loss may read (a balance loss of experts, features kept by a hook), follow those of the result; these slots are
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundelay.errors import CaptureError, JobError
from roundelay.frontend.export.export_checks import refuse_own_backwards, refusing_draws, refusing_tensor_hooks
from roundelay.frontend.export.trace_guards import guarded_trace, owners_of
from roundelay.frontend.export.traced_checks import Check
from roundelay.reach.reachable_state import Change, ReachableState, StateSlot
from roundelay.reach.slot_values import MISSING
from roundelay.reach.source_lines import set_at

Inputs = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


def default_inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's (args, kwargs) without ``Job(inputs=...)``: all of a tuple but its last item, or all of a mapping.

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
    """Layout of one call of the model: its containers, and the leaves that are not tensors.

    Args:
        spec: pytree of (args, kwargs).
        constants: leaf index to the constant at that leaf.
    """

    spec: pytree.TreeSpec
    constants: dict[int, Any]

    @staticmethod
    def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], CallShape]:
        """Tensor leaves of a call, in order, and the rest of it."""
        if not kwargs and {*map(type, args)} <= {torch.Tensor}:
            return list(args), _positional(len(args))
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

    def differing(self, other: CallShape) -> tuple[str, Any, Any] | None:
        """The first constant in which two calls of the same layout differ: its name, value here, value in ``other``."""
        if self is other or self.spec != other.spec:
            return None
        for i in sorted({*self.constants, *other.constants}):
            one, two = self.constants.get(i, _TENSOR), other.constants.get(i, _TENSOR)
            if not _same_constant(one, two):
                return self.named(i), one, two
        return None

    def named(self, place: int) -> str:
        """The argument of a leaf, for error messages: ``argument 1``, ``argument 'scale'``."""
        args, kwargs = pytree.tree_unflatten(list(range(self.spec.num_leaves)), self.spec)
        for name, part in (*enumerate(args), *kwargs.items()):
            if place in pytree.tree_leaves(part):
                return f"argument {name!r}"
        return f"leaf {place}"


class _Tensor:
    """Stands for a tensor where another call has a constant."""

    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()


def _same_constant(one: Any, two: Any) -> bool:
    """Whether two constants are the same; 1, 1.0 and True are not."""
    if one is two:
        return True
    try:
        return type(one) is type(two) and bool(one == two or (one != one and two != two))
    except Exception:  # a user's class, or one that compares item by item
        return False


@cache
def _positional(count: int) -> CallShape:
    """The layout of a call with ``count`` positional tensors, as of most models."""
    return CallShape(pytree.tree_structure(((0,) * count, {})), {})


@dataclass(frozen=True, slots=True)
class OutputShape:
    """Layout of the model's result.

    Args:
        spec: pytree of the result.
        rest: leaf index to a leaf that is not a tensor (a number, None, a cache object).
        numbers: indices, among the tensor leaves, of numbers that depend on sizes; they travel as tensors.
    """

    spec: pytree.TreeSpec
    rest: dict[int, Any]
    numbers: tuple[int, ...] = ()

    def unflatten(self, tensors: Mapping[int, Any]) -> Any:
        """Rebuild the result; ``tensors`` maps the index among tensor leaves to the leaf."""
        if self.spec.is_leaf() and not self.rest:  # a model that returns a tensor, as most do
            return tensors[0]
        leaves, position = [], 0
        for i in range(self.spec.num_leaves):
            if i in self.rest:
                leaves.append(self.rest[i])
            else:
                leaf = tensors[position]
                leaves.append(int(leaf) if position in self.numbers and isinstance(leaf, torch.Tensor) else leaf)
                position += 1
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def num_tensors(self) -> int:
        """Number of tensor leaves."""
        return self.spec.num_leaves - len(self.rest)


class Opaque:
    """Stands for a value that is not sent to the last stage; using it raises an error."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise _unobserved(f"attribute {name!r} of {self._what}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Opaque)]
        raise _unobserved(found[0]._what)

    def _used(self, *_: Any) -> Any:
        raise _unobserved(self._what)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _used
    __neg__ = __abs__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = _used
    __len__ = __getitem__ = __contains__ = __hash__ = _used


def _unobserved(what: str) -> JobError:
    return JobError(
        what,
        got="a use of it in the loss",
        expected="what the loss read on the first batch",
        remedy="Let the loss read the same tensors for every batch; strings and other objects are not sent.",
    )


@dataclass(frozen=True, slots=True)
class SideOutput:
    """A slot in which a forward has left tensors, and their layout there."""

    slot: StateSlot
    shape: OutputShape


class LazyBuffer(Exception):
    """A forward has set buffers that were None: the first call differs from all others, and must come before export."""


@dataclass(slots=True)
class Seen:
    """Record of one forward, kept outside the module, whose attributes export restores.

    Args:
        shape: layout of the result; None before the first call.
        left: slots in which the forward leaves tensors; their leaves follow the result's in this order.
        changed: every slot that the forward changes, except buffers, with its value before.
        replaced: names of buffers that it replaces.
        checks: what it asks of tensors' values; these follow all other leaves.
    """

    shape: OutputShape | None = None
    left: tuple[SideOutput, ...] = ()
    changed: tuple[Change, ...] = ()
    replaced: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


Roots = Sequence[tuple[str, Any]]
"""Where the search for side effects starts: pairs of a name for error messages and a module or a function."""


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
        """Call the model as the user would; return the tensor leaves of its result, then those left in slots."""
        args, kwargs = self._call.unflatten(list(leaves))
        state = ReachableState(self._roots)
        try:
            with refusing_draws(), refusing_tensor_hooks(), guarded_trace(self._owners) as truths:
                result = self.model(*args, **kwargs)
                changes = state.changes()
                self.seen.replaced = _write_buffers(changes)
        finally:
            state.restore()
        _refuse_parameters(changes)
        self.seen.checks = tuple(check for _, check in truths.checks)
        asked = [value.bool().detach() for value, _ in truths.checks]
        kept = [change for change in changes if change.slot.kind not in ("buffer", "parameter")]
        return [*self._leaves(result, kept), *asked]

    def _leaves(self, result: Any, changes: list[Change]) -> list[torch.Tensor]:
        """Tensor leaves of the result and of changed slots; stores their layouts in :attr:`seen`."""
        results, self.seen.shape = _flatten_leaves(result, numbers=True)
        left = []
        for change in changes:
            values = list(change.after) if change.slot.kind == "contents" else change.after
            tensors, shape = _flatten_leaves(values)
            if tensors and change.slot.kind != "state":
                left.append(SideOutput(change.slot, shape))
                results += tensors
        refuse_own_backwards(results)
        self.seen.left, self.seen.changed = tuple(left), tuple(changes)
        return results


def _write_buffers(changes: Sequence[Change]) -> tuple[str, ...]:
    """Copy the values of replacement buffers into the original ones; returns the paths of these.

    Raises:
        LazyBuffer: a buffer was None.
        CaptureError: a replacement has another shape or dtype.
    """
    changed = [change for change in changes if change.slot.kind == "buffer"]
    if any(change.before in (None, MISSING) for change in changed if not isinstance(change.before, torch.Tensor)):
        raise LazyBuffer
    values = []
    for change in changed:
        old, new = change.before, change.after
        if not isinstance(new, torch.Tensor) or new.shape != old.shape or new.dtype != old.dtype:
            raise _other_buffer(change)
        values.append(new.detach())  # before the first copy: two buffers may be swapped
    for change, value in zip(changed, values, strict=True):
        change.before.copy_(value)
    return tuple(change.slot.path for change in changed)


def _refuse_parameters(changes: Sequence[Change]) -> None:
    """Refuse a forward that replaces parameters, by a CaptureError."""
    for change in changes:
        if change.slot.kind == "parameter":
            where = set_at(change)
            created = change.before in (None, MISSING) if not isinstance(change.before, torch.Tensor) else False
            raise CaptureError(
                f"parameter {change.slot.path!r}, which the forward {'makes' if created else 'replaces'}"
                f"{', ' + where if where else ''}",
                got="a parameter that the optimizer does not know" if created else "another tensor in its place",
                expected="parameters that __init__ makes, and that only the optimizer changes",
                remedy="Make it in __init__, or call the model once in job(), before Job(...) is constructed."
                if created
                else "Compute a new tensor under another name, or use torch.nn.utils.parametrize.",
            )


def _other_buffer(change: Change) -> CaptureError:
    def described(value: Any) -> str:
        return f"shape {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)

    where = set_at(change)
    return CaptureError(
        f"buffer {change.slot.path!r}, which the forward replaces{', ' + where if where else ''}",
        got=described(change.after),
        expected=f"{described(change.before)}, as before: a buffer has one size and one dtype",
        remedy="Register it in __init__ with the size and dtype that it will have.",
    )


def _flatten_leaves(value: Any, *, numbers: bool = False) -> tuple[list[torch.Tensor], OutputShape]:
    """Tensor leaves and layout of a value; with ``numbers``, numbers that depend on sizes become tensors."""
    leaves, spec = _tree_flatten(value)
    sizes = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt)] if numbers else []
    leaves = [torch.scalar_tensor(leaf, dtype=torch.int64) if i in sizes else leaf for i, leaf in enumerate(leaves)]
    rest = {i: _storable(leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    places = [i for i in range(len(leaves)) if i not in rest]
    order = tuple(k for k, i in enumerate(places) if i in sizes)
    return [leaves[i] for i in places], OutputShape(spec, rest, order)


def _tree_flatten(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and layout of a result; registers dataclasses and plain classes that it contains with pytree."""
    leaves, spec = pytree.tree_flatten(result)
    new = {type(leaf) for leaf in leaves if _is_container(leaf)}
    for kind in new:
        if is_dataclass(kind) and all(field.init for field in fields(kind)):
            pytree.register_dataclass(kind)
        else:
            pytree.register_pytree_node(kind, _attributes, partial(_with_attributes, kind))
    return _tree_flatten(result) if new else (leaves, spec)


def _is_container(leaf: Any) -> bool:
    """Whether it is an object whose attributes hold tensors, such as a dataclass or a user's class of results."""
    if isinstance(leaf, (type, torch.Tensor, torch.nn.Module)) or not hasattr(leaf, "__dict__"):
        return False
    if is_dataclass(leaf) and all(field.init for field in fields(leaf)):
        return True
    return any(isinstance(value, torch.Tensor) or _is_container(value) for value in vars(leaf).values())


def _attributes(value: Any) -> tuple[list[Any], tuple[tuple[str, bool], ...]]:
    """Attributes, and of each its name and whether it is a size, whose numbers may depend on the input's."""
    own = vars(value)
    sized = {name: isinstance(item, torch.Size) for name, item in own.items()}
    return [tuple(item) if sized[name] else item for name, item in own.items()], tuple(sized.items())


def _with_attributes(kind: type, values: Any, names: Any) -> Any:
    rebuilt: Any = object.__new__(kind)
    pairs = zip(names, values, strict=True)
    rebuilt.__dict__.update({name: torch.Size(item) if sized else item for (name, sized), item in pairs})
    return rebuilt


def _storable(leaf: Any) -> Any:
    plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return leaf if plain else Opaque(f"an output of type {type(leaf).__name__}")
