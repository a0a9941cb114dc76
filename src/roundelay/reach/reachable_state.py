"""Find and undo the side effects of a call of user code, by walking through all objects that the code can reach.

A forward may leave a tensor in an attribute, in a dict that a hook fills, in a list; a loss may count its calls. The
walk visits everything that models and functions can reach, as slots: attributes of modules and of plain objects,
entries of dicts, the contents of lists, cells of closures, and globals that a function names. Two walks give what a
call in between has changed, and it can be undone. Values of tensors and arrays are compared on request: copies are
kept, up to :data:`MOST_BYTES`.

Python's own iterators, such as ``itertools.count``, are compared and restored as copies. Not found: frames of
generators, the contents of objects of torch and NumPy, containers of more than :data:`MOST` items, state that only C
code reaches, and what lies deeper in installed packages than the next :data:`MOST_INSTALLED` objects.
"""

from __future__ import annotations

import copy
import csv
import dis
import functools
import gc
import inspect
import random
import re
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from io import IOBase, StringIO
from typing import Any, Literal, final

import numpy as np
import torch

from roundelay.reach.installed_code import is_installed, module_of
from roundelay.reach.slot_values import (
    GENERATORS,
    ITERATORS,
    MISSING,
    READERS,
    WRITERS,
    address,
    copied_values,
    in_cell,
    same,
    same_values,
)

MOST = 10_000
"""Containers with more items are not walked through."""

MOST_INSTALLED = 2_000
"""Objects visited that only the code of installed packages reaches, the nearest first: some packages hold 100,000 in
tables of everything that they can build. Of transformers' models fewer than 250 are.
"""

_LIBRARIES = ("torch", "numpy", "builtins", "roundelay", "functools", "collections", "typing", "logging", "threading")
"""Packages whose objects and functions are not walked into, except containers and partials."""

_NUMBERS, _LAST_NAME = re.compile(r"(\[\d+\])+$"), re.compile(r"\['([^']*)'\]$|(\w+)$")

_OF_MODULES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

PYTHON_GENERATORS = (("random", random._inst), ("numpy.random", np.random.mtrand._rand))
"""The default random number generators of Python and NumPy, as roots of :class:`ReachableState`."""

DEFAULT_GENERATORS = (*PYTHON_GENERATORS, ("torch", torch.default_generator))
"""These and torch's."""

_CSV_WRITER = type(csv.writer(StringIO()))

MOST_BYTES = 1 << 31
"""Bytes of tensors and arrays that are copied for comparison; further ones are not compared."""

Kind = Literal["attribute", "class", "buffer", "parameter", "item", "contents", "cell", "state", "values"]


_Queue = deque[tuple[str, Any]]

SlotId = tuple[int, str, Any]
"""The id of a slot's holder, the slot's kind and its key."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSlot:
    """One place where an object holds a value.

    Args:
        holder: the object.
        kind: an attribute of an object or a class, a buffer or a parameter of a module, an entry of a dict, the
            contents of a list, a set or a deque, the cell of a closure, the state of a random number generator, or the
            values of a tensor or an array.
        key: the name or key under which the object holds the value.
        path: the slot's name in error messages.
    """

    holder: Any
    kind: Kind
    key: Any
    path: str

    @property
    def id(self) -> SlotId:
        """Identifies the slot."""
        return id(self.holder), self.kind, self.key

    @property
    def name(self) -> str:
        """The name by which code would read the slot: the last one of its path."""
        if isinstance(self.key, str):
            return self.key
        match = _LAST_NAME.search(_NUMBERS.sub("", self.path))
        return self.path if match is None else match[1] or match[2]

    def read(self) -> Any:
        """The current value, :data:`MISSING` if there is none."""
        if self.kind in READERS:
            return READERS[self.kind](self.holder)
        if self.kind == "class":
            return vars(self.holder).get(self.key, MISSING)
        return dict.get(self._entries(), self.key, MISSING)  # bypasses overridden methods

    def write(self, value: Any) -> None:
        """Set the value without running user code; :data:`MISSING` removes it."""
        value = copy.copy(value) if isinstance(value, ITERATORS) else value  # the snapshot's must not advance
        if self.kind in WRITERS:
            WRITERS[self.kind](self.holder, value)
        elif self.kind == "class":
            setattr(self.holder, self.key, value)
        elif value is MISSING:
            _built_in(entries := self._entries()).pop(entries, self.key, None)
        else:
            _built_in(entries := self._entries()).__setitem__(entries, self.key, value)

    def _entries(self) -> dict[Any, Any]:
        if self.kind == "item":
            return self.holder  # type: ignore[no-any-return]
        entries: dict[Any, Any] = self.holder.__dict__
        return entries if self.kind == "attribute" else entries["_buffers" if self.kind == "buffer" else "_parameters"]


def _built_in(entries: dict[Any, Any]) -> Any:
    """The built-in class whose methods keep the entries consistent."""
    return OrderedDict if isinstance(entries, OrderedDict) else dict


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A slot whose value a call has changed."""

    slot: StateSlot
    before: Any
    after: Any


@final
class ReachableState:
    """All slots reachable from some objects, with their current values.

    Args:
        roots: name and object of each starting point: modules, functions.
        own: a model whose parameters and buffers are left out; the values of all other tensors and arrays are slots
            too. None: no values are.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], own: torch.nn.Module | None = None) -> None:
        #: where the walk started
        self.roots = tuple(roots)
        self.slots: dict[SlotId, StateSlot] = {}
        self._values: dict[SlotId, Any] = {}
        self._holders: dict[int, Any] = {}
        self._excluded = None if own is None else {m for t in (*own.parameters(), *own.buffers()) if (m := address(t))}
        left = MOST_BYTES
        for slot, value in _walk(self.roots, self._holders, self._excluded):
            if slot.kind == "values":
                left -= value.nbytes
                if left < 0:
                    continue
                value = copied_values(value)
            self.slots.setdefault(slot.id, slot)
            self._values.setdefault(slot.id, copy.copy(value) if isinstance(value, ITERATORS) else value)

    def changes(self) -> list[Change]:
        """All changes since: only topmost slots, of holders that could be reached before."""
        changes, seen = [], set()
        for slot, after in _walk(self.roots, {}, self._excluded):
            if slot.id in seen or slot.id[0] not in self._holders:
                continue
            seen.add(slot.id)
            before = self._values.get(slot.id, MISSING)
            if slot.kind == "values":
                if before is not MISSING and not same_values(before, after):
                    changes.append(Change(slot, before, copied_values(after)))
            elif not same(before, after):
                changes.append(Change(slot, before, after))
        for key, slot in self.slots.items():  # no longer reachable, but perhaps changed
            if key not in seen and not same_value(slot, self._values[key]):
                changes.append(Change(slot, self._values[key], slot.read()))
        return changes

    def restore(self, except_kinds: Collection[Kind] = ()) -> None:
        """Undo all changes since, the last one first, except in some kinds of slots."""
        for change in reversed(self.changes()):
            if change.slot.kind not in except_kinds:
                change.slot.write(change.before)

    def first_read(self, changes: Sequence[Change]) -> Change | None:
        """The first of some changes whose slot the roots' code can read."""
        names, _ = self.names()
        return next((c for c in changes if c.slot.id in self.slots and c.slot.name in names), None)

    def names(self) -> tuple[set[str], set[str]]:
        """Names and strings that the roots' functions, and those that they may call by name, read and assign to.

        A slot with another name is not read, except by code that computes names. All strings of a function that sets
        dict entries count as assigned.
        """
        read, assigned = set[str](), set[str]()
        known = {type(holder) for holder in self._holders.values() if not is_library(type(holder))}
        functions = [function for _, root in self.roots for function in _functions_of(root)]
        seen: set[types.CodeType] = set()
        while functions:
            function = functions.pop()
            if function.__code__ in seen:
                continue
            seen.add(function.__code__)
            names = _names(function.__code__) | _texts(function.__code__)
            for name in names - read:
                functions += _functions_of(function.__globals__.get(name))
                functions += [
                    inner for kind in known for inner in _functions_of(inspect.getattr_static(kind, name, None))
                ]
            for cell in function.__closure__ or ():
                functions += _functions_of(in_cell(cell))
            read |= names
            assigned |= _assigned_names(function.__code__)
        return read, assigned

    def files(self) -> list[IOBase]:
        """The files that the roots can reach, also those that a ``csv.writer`` writes into."""
        writers = [value for value in self._values.values() if isinstance(value, _CSV_WRITER)]
        methods = [method for writer in writers for method in gc.get_referents(writer)]
        found = [*self._holders.values(), *(getattr(method, "__self__", None) for method in methods)]
        return list({id(file): file for file in found if isinstance(file, IOBase)}.values())

    def holding(self, wanted: Any) -> list[StateSlot]:
        """The slots that hold an object, including containers that hold it among others."""
        parts = {key: value if key[1] == "contents" else (value,) for key, value in self._values.items()}
        return [self.slots[key] for key, items in parts.items() if any(item is wanted for item in items)]


def reachable_tensors(roots: Sequence[tuple[str, Any]]) -> list[torch.Tensor]:
    """Every tensor with memory of its own that some objects can reach, parameters and buffers included."""
    holders: dict[int, Any] = {}
    for _ in _walk(roots, holders, frozenset()):
        pass
    return [holder for holder in holders.values() if isinstance(holder, torch.Tensor)]


def same_value(slot: StateSlot, before: Any) -> bool:
    """Whether a slot still holds an earlier value."""
    return same_values(before, slot.holder) if slot.kind == "values" else same(before, slot.read())


def _walk(
    roots: Sequence[tuple[str, Any]], holders: dict[int, Any], excluded: Collection[int] | None = None
) -> Iterator[tuple[StateSlot, Any]]:
    """Yield every reachable slot with its value; adds every object that holds one to ``holders``, by id.

    Unless ``excluded`` is None, values of tensors and arrays outside these addresses are slots as well; the yielded
    value is the tensor itself.
    """
    own, installed = deque(roots), deque[tuple[str, Any]]()
    left = MOST_INSTALLED
    while own or (installed and left):
        queue = own or installed
        path, value = queue.popleft()
        if id(value) in holders or isinstance(value, (str, bytes, int, float, type(None))):
            continue
        if isinstance(value, (torch.Tensor, np.ndarray)):
            if excluded is not None and (memory := address(value)) and memory not in excluded:
                holders[id(value)] = value
                yield StateSlot(value, "values", None, path), value
            continue
        slots = list(_slots(path, value))
        if slots or isinstance(value, (tuple, *_CONTAINERS)) or _is_plain(value):
            holders[id(value)] = value
        yield from slots
        left -= queue is installed
        _queue_below(value, queue, own, installed).extend(_below(path, value, slots))


def _queue_below(value: Any, queue: _Queue, own: _Queue, installed: _Queue) -> _Queue:
    """Where what an object of a queue reaches is put: code says whose it is, other objects are their holder's."""
    if isinstance(value, (types.FunctionType, type)):
        return installed if is_installed(value) else own
    return queue


_CONTAINERS = (list, dict, set, deque)


def _slots(path: str, value: Any) -> Iterator[tuple[StateSlot, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from _of_module(path, value)
    elif isinstance(value, dict):
        if len(value) <= MOST:
            yield from ((StateSlot(value, "item", key, f"{path}[{key!r}]"), item) for key, item in list(value.items()))
    elif isinstance(value, (list, set, deque)):
        if len(value) <= MOST:
            yield StateSlot(value, "contents", None, path), tuple(value)
    elif isinstance(value, GENERATORS):
        yield StateSlot(value, "state", None, path), READERS["state"](value)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, type):
        if not is_library(value):
            yield from _of_class(path, value)
    elif _is_plain(value):
        entries = vars(value)
        yield from ((StateSlot(value, "attribute", key, f"{path}.{key}"), item) for key, item in list(entries.items()))


def _of_module(path: str, module: torch.nn.Module) -> Iterator[tuple[StateSlot, Any]]:
    entries, apart = module.__dict__, (*_OF_MODULES, *_HOOKS)
    own = {k: v for k, v in entries.items() if k not in apart and not k.startswith("_backward_")}
    tables: list[tuple[Kind, dict[str, Any]]] = [("attribute", own)]
    tables += [("buffer", entries.get("_buffers", {})), ("parameter", entries.get("_parameters", {}))]
    for kind, table in tables:
        for key, item in list(table.items()):
            yield StateSlot(module, kind, key, f"{path}.{key}"), item


def _of_class(path: str, kind: type) -> Iterator[tuple[StateSlot, Any]]:
    """Class attributes that are numbers, strings, tensors or containers."""
    for key, item in list(vars(kind).items()):
        if not key.startswith("__") and isinstance(item, (bool, int, float, str, torch.Tensor, *_CONTAINERS)):
            yield StateSlot(kind, "class", key, f"{path}.{key}"), item


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[StateSlot, Any]]:
    if is_library(function):
        return
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        content = in_cell(cell)
        yield StateSlot(cell, "cell", name, name), content
    used = function.__globals__
    for name in sorted(_names(function.__code__)):
        if name in used and not isinstance(used[name], (types.ModuleType, type)):
            yield StateSlot(used, "item", name, name), used[name]


def _below(path: str, value: Any, slots: Sequence[tuple[StateSlot, Any]]) -> Iterator[tuple[str, Any]]:
    """The objects that the walk visits next, with their paths."""
    for slot, inner in slots:
        if slot.kind == "contents":
            yield from ((f"{slot.path}[{i}]", item) for i, item in enumerate(inner))
        elif slot.kind != "state":
            yield slot.path, inner
    if isinstance(value, torch.nn.Module):
        parts = value.__dict__.get("_modules", {})
        yield from ((f"{path}.{name}", part) for name, part in list(parts.items()) if part is not None)
        yield from ((f"{path}.{hooks}", value.__dict__[hooks]) for hooks in _HOOKS if hooks in value.__dict__)
        yield path, type(value).forward
        yield from ((path, base) for base in type(value).__mro__ if not is_library(base))
    elif isinstance(value, tuple) and len(value) <= MOST:
        yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield path, value.__self__
        yield path, value.__func__
    elif isinstance(value, functools.partial):
        yield from ((path, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, types.FunctionType) and not is_library(value):
        yield from ((path, part) for part in (value.__defaults__, value.__kwdefaults__) if part is not None)
    elif _is_plain(value) and not isinstance(value, type):
        yield path, type(value)
        if callable(value):
            yield path, type(value).__call__


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of all functions defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _names(code: types.CodeType) -> set[str]:
    """The global and attribute names that a function's code uses."""
    return {name for part in _nested(code) for name in part.co_names}


def _texts(code: types.CodeType) -> set[str]:
    """The string constants in a function's code."""
    return {constant for part in _nested(code) for constant in part.co_consts if isinstance(constant, str)}


def _assigned_names(code: types.CodeType) -> set[str]:
    """Names that a function's code assigns to, and all its strings if it sets entries."""
    names = set()
    for part in _nested(code):
        for step in dis.get_instructions(part):
            if step.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"):
                names.add(step.argval)
            elif step.opname == "STORE_SUBSCR":
                names |= _texts(part)
    return names


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The user's functions that a call of ``value`` runs first."""
    if isinstance(value, torch.nn.Module):
        parts = [part for part in value.modules() if not is_library(type(part))]
        return [function for part in parts for function in _functions_of(type(part).forward)]
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        return _functions_of(value.func)
    if isinstance(value, types.FunctionType):
        return [] if is_library(value) else [value]
    if _is_plain(value) and not isinstance(value, type) and callable(value):
        return _functions_of(type(value).__call__)
    return []


def _is_plain(value: Any) -> bool:
    """Whether it is an object of a user's class, with attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, types.ModuleType) and not is_library(type(value))


def is_library(what: Any) -> bool:
    """Whether a class or a function belongs to a package that is not walked into."""
    return module_of(what).split(".")[0] in _LIBRARIES
