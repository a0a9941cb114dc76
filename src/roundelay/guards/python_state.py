"""Refuse a forward or a loss that depends on what an earlier call has left in an attribute or a variable.

A balance loss that a layer leaves in an attribute is only written; a counter by which a temperature falls is read, and
a captured graph would hold its first value for ever. To tell them apart, the user's model and loss are called on one
batch before and after a call on another, from the same weights, buffers and random state. If the results differ, or
differ with other numbers in the changed slots, then such a slot is state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundelay.errors import CaptureError, JobError, RoundelayError
from roundelay.reach.reachable_state import Change, ReachableState, SlotId
from roundelay.reach.source_lines import line_of_change, set_at

STEPS = (1, 10, 100, 1_000, 10_000, 1_000_000)
"""Added to changed numbers: a schedule that counts its calls reacts to one of them."""

Call = Callable[[], Any]


def refuse_state(
    model: torch.nn.Module,
    call: Call,
    other: Call,
    roots: Sequence[tuple[str, Any]],
    of_loss: Collection[SlotId],
) -> None:
    """Refuse code in which one call reads what the previous one has left; all state is restored.

    Args:
        model: the model; its buffers are restored after each call.
        call: the user's model and loss on one batch; its results are compared.
        other: the same on another batch.
        roots: where the search for changes starts.
        of_loss: slots that the loss changes and the forward does not.

    Raises:
        CaptureError: the forward is such code.
        JobError: the loss is.
    """
    found = _found(model, call, other, roots)
    if found is not None:
        change, where = found
        raise _refusal(change, where, change.slot.id in of_loss)


def state_of(model: torch.nn.Module, call: Call, other: Call, roots: Sequence[tuple[str, Any]]) -> str:
    """The slot that a call reads as the previous one has left it, and where it is set; empty if there is none.

    Arguments as of :func:`refuse_state`. Empty, too, if the same call from the same state gives something else, as one
    that tells the time does.
    """
    found = _found(model, call, other, roots)
    if found is None or not _repeats(model, call, roots):
        return ""
    change, where = found
    return f"{change.slot.path}, which the loss sets{', ' + where if where else ''}"


def _repeats(model: torch.nn.Module, call: Call, roots: Sequence[tuple[str, Any]]) -> bool:
    state = ReachableState(roots, model)
    try:
        first = _computed(model, call)
        state.restore()
        return _alike(first, _computed(model, call))
    finally:
        state.restore()


def _found(
    model: torch.nn.Module, call: Call, other: Call, roots: Sequence[tuple[str, Any]]
) -> tuple[Change, str] | None:
    """A change by ``other`` that the next call reads, and where it is set; all state is restored."""
    state = ReachableState(roots, model)
    try:
        change = _state(model, call, other, state)
        if change is None:
            return None
        state.restore()
        return change, line_of_change(change, other) or set_at(change)
    finally:
        state.restore()


def _state(model: torch.nn.Module, call: Call, other: Call, state: ReachableState) -> Change | None:
    """A change by the call ``other`` that the next call reads, None if there is none."""
    first = _computed(model, call)
    state.restore()
    _computed(model, other)
    if not (changes := state.changes()):
        return None

    def differs(values: Sequence[tuple[Change, Any]] | None) -> bool:
        """Whether the results differ with only these values in their slots; None: with what ``other`` has left."""
        if values is not None:
            state.restore()
            for change, value in values:
                change.slot.write(value)
        try:
            result = _computed(model, call)
            return not _alike(first, result)
        except Exception:  # raised by user code on an unexpected value: so it was read
            return True

    if differs(None):
        return next((change for change in changes if differs([(change, change.after)])), changes[0])
    numbers = [change for change in changes if _is_number(change.before)]
    for step in STEPS if numbers else ():
        moved = [(change, change.before + step) for change in numbers]
        if differs(moved):
            return next((one[0] for one in moved if differs([one])), numbers[0])
    return None


def _refusal(change: Change, where: str, of_loss: bool) -> RoundelayError:
    """The error for such a slot."""
    slot = change.slot
    kind = JobError if of_loss else CaptureError
    subject = f"{slot.path}, which the {'loss' if of_loss else 'forward'} sets{', ' + where if where else ''}"
    got = "a state that the next call reads"
    if slot.kind == "state":
        got = "a random number generator of its own, from which each call draws"
        remedy = "Draw from torch's default generator, whose numbers are keyed by the run's seed."
    elif of_loss:
        remedy = "Give what changes from update to update as a tensor in the batch, or keep it in a buffer of the "
        remedy += "model that forward changes and returns."
    elif _is_number(change.before) or isinstance(change.before, bool):
        remedy = f'Keep it in a buffer: self.register_buffer("{slot.key}", torch.tensor({change.before!r})) in '
        remedy += f"__init__, and self.{slot.key} = self.{slot.key} + 1 in forward, with torch operations on it."
    else:
        remedy = f'Keep it in a buffer of a fixed size: self.register_buffer("{slot.key}", torch.zeros(...)) in '
        remedy += "__init__; forward may replace it."
    expected = "a result that depends on its arguments, weights and buffers alone: stages keep nothing else"
    return kind(subject, got=got, expected=expected, remedy=remedy)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _computed(model: torch.nn.Module, call: Call) -> list[Any]:
    """Leaves of a call's result, from a fixed random state and the current buffers."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _buffers_kept(model):
        torch.manual_seed(0)
        leaves = pytree.tree_leaves(call())
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards: the same tensors with the same values."""
    kept = [(held, name, buffer) for m in model.modules() for held in (m._buffers,) for name, buffer in held.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for (held, name, buffer), value in zip(kept, values, strict=True):
                held[name] = buffer
                if buffer is not None and value is not None:
                    buffer.resize_(value.shape)
                    buffer.copy_(value)


def _alike(one: Sequence[Any], two: Sequence[Any]) -> bool:
    return len(one) == len(two) and all(map(_equal, one, two))


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
    if isinstance(one, float | int) and isinstance(two, float | int):
        return one == two or (one != one and two != two)
    return isinstance(one, torch.Tensor) == isinstance(two, torch.Tensor)
