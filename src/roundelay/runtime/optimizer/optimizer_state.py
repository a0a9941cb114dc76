"""The state that an optimizer keeps between steps, wherever it keeps it: read for a checkpoint, and restored.

======================================================  =========================================================
kept in                                                 stored
======================================================  =========================================================
``state[parameter]``, of wrapped optimizers too         under the parameter's name
an attribute with an entry for every parameter          under the parameter's name
an entry of a group that a step has changed             under :data:`WHOLE`, by the group's index
any other attribute that is not as it was made          under :data:`WHOLE`
======================================================  =========================================================

Options (learning rates, betas) that no step of the optimizer itself has changed are not stored: the job's code and its
scheduler set them, also when a run resumes from a checkpoint. What the optimizer's own step has written, including a
learning rate, is its state, and the checkpoint's value wins.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

from roundelay.errors import CheckpointError, JobError
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.job import Named
from roundelay.runtime.optimizer.nested_state import flatten, unflatten
from roundelay.runtime.optimizer.optimizer_wrappers import all_groups, all_optimizers, all_states

WHOLE = ""
"""Replaces a parameter's name for entries of the whole optimizer: no parameter has this name."""

Entry = tuple[str, int, str]
"""(path of the optimizer, index of the group, key)."""

_MAX_DEPTH = 4
"""Nesting up to which an attribute is compared."""

_OF_GROUPS = ("params", "param_names")
_OF_TORCH = {
    "defaults",
    "state",
    "param_groups",
    "step",
    "grad_scale",
    "found_inf",
    "_opt_called",
    "_step_count",
    "_zero_grad_profile_name",
    "_need_device_dtype_check_for_fused",
    "_warned_capturable_if_run_uncaptured",
}
_GROUP = re.compile(r"(?P<path>.*) group (?P<index>\d+):(?P<rest>.*)", re.DOTALL)
_ATTRIBUTE = re.compile(r"(?P<path>.*) attribute:(?P<rest>.*)", re.DOTALL)
_BY = re.compile(r"(?P<path>.*) attribute (?P<key>.*) by (?P<by>parameter|id|name|place):(?P<rest>.*)", re.DOTALL)
_OF_PART = re.compile(r"(?P<path>\..*): (?P<rest>.*)", re.DOTALL)


@final
class OptimizerState:
    """The state of one optimizer.

    Args:
        optimizer: as the job's function returns it, not yet narrowed to a stage.
        named: the parameters with which it was made.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named) -> None:
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named}
        #: by optimizer, names of its parameters in the order of its groups, for attributes that are lists in that order
        self._places = {
            held.path: [self._names[id(p)] for group in held.optimizer.param_groups for p in group["params"]]
            for held in all_optimizers(optimizer)
        }
        self._groups = all_groups(optimizer)
        self._initial = {(path, key): self._mark(value) for path, key, value in _attributes(optimizer)}
        self._options = self._marks()
        #: entries of groups that steps of the optimizer itself have changed
        self.changed: set[Entry] = set()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A context for the optimizer's step: what it changes in its groups counts as state from now on.

        Raises:
            JobError: an option has been changed by hand since the last step.
        """
        self.check()
        yield
        now = self._marks()
        self.changed |= {entry for entry, mark in now.items() if self._options.get(entry) != mark}
        self._options = now

    def accept_options(self) -> None:
        """Accept the options as they are now: a scheduler or a resumed run has set them."""
        self._options = self._marks()

    def check(self) -> None:
        """Refuse options that the user's program has changed by hand: other stages' optimizers do not change with them.

        Raises:
            JobError: naming the option.
        """
        now = self._marks()
        if now == self._options:
            return
        path, i, key = next(entry for entry in {**now, **self._options} if now.get(entry) != self._options.get(entry))
        value = next(group.get(key) for p, j, group in self._groups if (p, j) == (path, i))
        raise JobError(
            f"optimizer{path}.param_groups[{i}][{key!r}], changed by the job while it trains (by batches, evaluate or "
            "a callback)",
            got=f"{value!r:.80}",
            expected="what the job's optimizer and scheduler set: every stage has its own optimizer, which a "
            "change by hand does not reach",
            remedy="Use Job(scheduler=...), for example scheduler=lambda optimizer: LambdaLR(optimizer, lambda update: "
            "0.99**update)."
            if key == "lr"
            else "Let the step of an optimizer class of your own change it: a subclass whose step() sets it first.",
        )

    def _marks(self) -> dict[Entry, Any]:
        return {
            (path, i, key): self._mark(value)
            for path, i, group in self._groups
            for key, value in group.items()
            if key not in _OF_GROUPS
        }

    def _mark(self, value: Any, depth: int = _MAX_DEPTH) -> Any:
        """A comparable mark of a value: its content; of a tensor its identity and how often it was written."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return self._names.get(id(value)) or (id(value), value._version)
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if depth and isinstance(value, (list, tuple, deque)):
            return type(value), tuple([self._mark(item, depth - 1) for item in value])
        if depth and isinstance(value, dict):
            return dict, tuple([(_key(key), self._mark(item, depth - 1)) for key, item in value.items()])
        if depth and hasattr(value, "__dict__") and not callable(value) and not _is_torch(value):
            return type(value), self._mark(vars(value), depth - 1)
        return id(value)

    def entries(self, own: Mapping[str, torch.nn.Parameter], *, copied: bool = True) -> dict[str, dict[str, Any]]:
        """The state as flat entries, by parameter name or under :data:`WHOLE`.

        Args:
            own: the stage's parameters by name. Entries of a group in which none of them is trained are left out.
            copied: return copies on the CPU, not the tensors themselves.

        Raises:
            JobError: an entry is of a type that cannot be stored.
        """
        states = {name: self._of(name, parameter) for name, parameter in own.items()}
        states[WHOLE] = self._whole(own)
        if not copied:
            return states
        return {
            name: {k: v.detach().to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in flat.items()}
            for name, flat in states.items()
            if flat
        }

    def _of(self, name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for path, state in all_states(self.optimizer):
            entries = state.get(parameter)
            if entries:
                flat |= {f"{path}: {k}" if path else k: v for k, v in flatten(entries).items()}
        for path, key, value in self._changed_attributes():
            by = self._by(path, value)
            place = self._place(path, by, name, parameter)
            if by and place is not None and (by == "place" or place in value):
                entries = flatten({"value": value[place]})
                flat |= {f"{path} attribute {key} by {by}:{k}": v for k, v in entries.items()}
        return flat

    def _whole(self, own: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
        trained = {id(parameter) for parameter in own.values() if parameter.requires_grad}
        flat: dict[str, Any] = {}
        for path, i, group in self._groups:
            if any(id(parameter) in trained for parameter in group["params"]):
                state = {key: value for key, value in group.items() if (path, i, key) in self.changed}
                flat |= {f"{path} group {i}:{k}": v for k, v in flatten(state).items()}
        for path, key, value in self._changed_attributes():
            if not self._by(path, value):
                flat |= {f"{path} attribute:{k}": v for k, v in flatten({key: value}).items()}
        return flat

    def _changed_attributes(self) -> Iterator[tuple[str, str, Any]]:
        for path, key, value in _attributes(self.optimizer):
            if self._mark(value) != self._initial.get((path, key), _ABSENT):
                yield path, key, value

    def _by(self, path: str, value: Any) -> str:
        """How the keys of an attribute with an entry per parameter identify it; empty if it has no such entries."""
        if isinstance(value, dict) and value:
            keys = list(value)
            if all(isinstance(key, torch.Tensor) and id(key) in self._names for key in keys):
                return "parameter"
            if all(type(key) is int and key in self._names for key in keys):
                return "id"
            if set(keys) <= set(self._names.values()):
                return "name"
        places = self._places[path]
        if type(value) is list and value and len(value) == len(places) and isinstance(value[0], torch.Tensor):
            return "place"
        return ""

    def _place(self, path: str, by: str, name: str, parameter: torch.nn.Parameter) -> Any:
        if by == "place":
            return self._places[path].index(name) if name in self._places[path] else None
        return {"parameter": parameter, "id": id(parameter), "name": name}.get(by)

    def restore(self, own: Mapping[str, torch.nn.Parameter], saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Put copies of saved entries into the optimizer, each tensor on the device where it would create it.

        A parameter without saved entries, such as one that was frozen until now, begins without a state, as in its
        first update.

        Args:
            own: the stage's parameters by name.
            saved: the :meth:`entries` of all stages.

        Raises:
            CheckpointError: the job's optimizer does not wrap what the checkpoint's did.
        """
        owners = {id(parameter): group for _, _, group in self._groups for parameter in group["params"]}
        for name, parameter in own.items():
            group = owners.get(id(parameter), {})
            counted_there = bool(group.get("fused") or group.get("capturable"))
            flat = {
                k: v.to(parameter.device if k.rpartition(" ")[2] != "step" or counted_there else v.device, copy=True)
                if isinstance(v, torch.Tensor)
                else v
                for k, v in flatten(saved.get(name, {})).items()
                if k not in (EMA, EVALUATED)
            }
            self._restore_one(name, parameter, flat)
        self._restore_whole(saved.get(WHOLE, {}))
        self.accept_options()

    def _restore_one(self, name: str, parameter: torch.nn.Parameter, flat: Mapping[str, Any]) -> None:
        optimizers = {held.path: held.optimizer for held in all_optimizers(self.optimizer)}
        states = dict(all_states(self.optimizer))
        of_state: dict[str, dict[str, Any]] = {}
        of_attributes: dict[tuple[str, str, str], dict[str, Any]] = {}
        for key, value in flat.items():
            if (by := _BY.fullmatch(key)) is not None and by["path"] in optimizers:
                of_attributes.setdefault((by["path"], by["key"], by["by"]), {})[by["rest"]] = value
            elif (of := _OF_PART.fullmatch(key)) is not None:
                of_state.setdefault(of["path"], {})[of["rest"]] = value
            else:
                of_state.setdefault(next(iter(states)) if "" not in states else "", {})[key] = value
        for path, entries in of_state.items():
            if path not in states:
                raise _does_not_match(f"state of its {path} for {name!r}", states)
            states[path][parameter] = unflatten(entries)
        for (path, key, kind), entries in of_attributes.items():
            holder = getattr(optimizers[path], key, None)
            holder = {} if holder is None else holder
            holder[self._place(path, kind, name, parameter)] = unflatten(entries)["value"]
            setattr(optimizers[path], key, holder)

    def _restore_whole(self, flat: Mapping[str, Any]) -> None:
        flat = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in flat.items()}
        groups = {(path, i): group for path, i, group in self._groups}
        for (path, i), entries in _by_group(flat).items():
            if (path, i) not in groups:
                raise _does_not_match(f"entries of optimizer{path}.param_groups[{i}]", [f"{p}[{j}]" for p, j in groups])
            for key, value in unflatten(entries).items():
                groups[path, i][key] = _on_device_of(groups[path, i].get(key), value)
        self.changed |= changed_entries(flat)
        optimizers = {held.path: held.optimizer for held in all_optimizers(self.optimizer)}
        for key in flat:
            if (of := _ATTRIBUTE.fullmatch(key)) is not None and of["path"] not in optimizers:
                raise _does_not_match(f"attribute {of['rest']} of its {of['path']}", optimizers)
        for path, optimizer in optimizers.items():
            start = f"{path} attribute:"
            entries = unflatten({k.removeprefix(start): v for k, v in flat.items() if k.startswith(start)})
            for key, value in entries.items():
                setattr(optimizer, key, _on_device_of(getattr(optimizer, key, None), value))


_ABSENT = object()


def changed_entries(flat: Mapping[str, Any]) -> set[Entry]:
    """The entries of groups among the flat entries under :data:`WHOLE`."""
    return {(path, i, key) for (path, i), entries in _by_group(flat).items() for key in unflatten(entries)}


def _by_group(flat: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for key, value in flat.items():
        if (of := _GROUP.fullmatch(key)) is not None:
            groups.setdefault((of["path"], int(of["index"])), {})[of["rest"]] = value
    return groups


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Any]]:
    """(path, name, value) of attributes that may be state: not torch's own, and neither functions nor optimizers."""
    for held in all_optimizers(optimizer):
        for key, value in list(vars(held.optimizer).items()):
            if key in _OF_TORCH or key.endswith("_hooks") or callable(value) or _is_optimizer(value):
                continue
            if isinstance(value, torch.nn.Parameter) or _is_state(held.optimizer, value):
                continue
            yield held.path, key, value


def _is_optimizer(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.optim.Optimizer) for item in items)


def _is_state(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Whether it is the state or the groups under another name, as wrappers keep them."""
    return isinstance(value, (dict, list)) and any(
        value is held.optimizer.state or value is held.optimizer.param_groups for held in all_optimizers(optimizer)
    )


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else id(key)


def _is_torch(value: Any) -> bool:
    return (type(value).__module__ or "").split(".")[0] in ("torch", "builtins", "collections")


def _on_device_of(before: Any, value: Any) -> Any:
    """The value, on the device of the one that it replaces."""
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(before.device)
    return value


def _does_not_match(got: str, known: Collection[Any]) -> CheckpointError:
    return CheckpointError(
        "the optimizer of the resumed run",
        got=f"a checkpoint with {got}",
        expected="an optimizer made as the checkpoint's was; this one has "
        + (", ".join(map(str, known)) or "nothing of this kind"),
        remedy="Resume with the optimizer of the run; or begin a new run with the weights alone: leave --from out, and "
        "call roundelay.load(model, RUN) in job().",
    )
