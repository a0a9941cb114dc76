"""Whether what a forward or a loss changes beside its result is read by the next call.

A balance loss that a layer leaves in an attribute is only written; a counter by which a temperature falls is read, and
a captured graph would hold its first value for ever. Both change a slot. Which it is shows by calling the person's own
model and loss on one batch before and after a call on another, from the same weights, buffers and random state: if they
compute something else, or if they do with other numbers in the slots, then the slot is a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundelay.errors import CaptureError, JobError, RoundelayError
from roundelay.frontend.reachable_state import Change, ReachableState, set_at
from roundelay.frontend.source_lines import line_of_change

STEPS = (1, 10, 100, 1_000, 10_000, 1_000_000)
"""What is added to numbers: schedules that count their calls change somewhere."""

Call = Callable[[], Any]


def refuse_state(
    model: torch.nn.Module,
    call: Call,
    other: Call,
    roots: Sequence[tuple[str, Any]],
    of_loss: Collection[tuple[int, str, Any]],
) -> None:
    """Refuse code whose next call reads what the last one has left. Its state is as it was afterwards.

    Args:
        model: whose buffers come back after each call.
        call: the person's model and loss on one batch; what it returns is compared.
        other: the same on another batch.
        roots: from where changes are looked for.
        of_loss: slots that the loss changes, and not the forward.

    Raises:
        CaptureError: the forward does.
        JobError: the loss does.
    """
    world = ReachableState(roots, model)
    changes: list[Change] = []
    where = ""
    try:
        found = _state(model, call, other, world, changes)
        if found is not None:
            world.restore()
            where = line_of_change(changes[found], other) or set_at(changes[found])
    finally:
        world.restore()
    if found is not None:
        raise _refusal(changes[found], where, changes[found].slot.place in of_loss)


def _state(model: torch.nn.Module, call: Call, other: Call, world: ReachableState, changes: list[Change]) -> int | None:
    """The number among the changes that one call makes of one that the next call reads; None if there is none."""
    first = _computed(model, call)
    world.restore()
    _computed(model, other)
    changes += world.changes()
    if not changes:
        return None
    try:
        same = _same(first, _computed(model, call))
    except Exception:  # the person's own code, on what the other call has left: it has read it
        same = False
    if not same:
        alone = (i for i, change in enumerate(changes) if _differs(model, call, world, first, [change], _after))
        return next(alone, 0)
    places = [i for i, change in enumerate(changes) if _is_number(change.before)]
    for step in STEPS if places else ():

        def moved(change: Change, step: int = step) -> Any:
            return change.before + step

        if _differs(model, call, world, first, [changes[i] for i in places], moved):
            return next((i for i in places if _differs(model, call, world, first, [changes[i]], moved)), places[0])
    return None


def _refusal(change: Change, where: str, of_loss: bool) -> RoundelayError:
    """What is told of such a state."""
    slot = change.slot
    kind = JobError if of_loss else CaptureError
    subject = f"{slot.path}, which the {'loss' if of_loss else 'forward'} sets{', ' + where if where else ''}"
    got = "a state that the next call reads"
    if slot.kind == "state":
        got = "a generator of random numbers of its own, by which each call draws"
        remedy = "Draw by torch's default generator, which each place draws by with the run's seed."
    elif of_loss:
        remedy = (
            "Give what changes from update to update as a tensor in the batch, or keep it in a buffer of the model "
        )
        remedy += "that forward changes and returns."
    elif _is_number(change.before) or isinstance(change.before, bool):
        remedy = f'Keep it in a buffer: self.register_buffer("{slot.key}", torch.tensor({change.before!r})) in '
        remedy += f"__init__, and self.{slot.key} = self.{slot.key} + 1 in forward, with torch operations on it."
    else:
        remedy = f'Keep it in a buffer of a fixed size: self.register_buffer("{slot.key}", torch.zeros(...)) in '
        remedy += "__init__; forward may replace it."
    expected = "a result of its arguments, weights and buffers alone: stages hold nothing else from batch to batch"
    return kind(subject, got=got, expected=expected, remedy=remedy)


def _after(change: Change) -> Any:
    return change.after


def _differs(
    model: torch.nn.Module,
    call: Call,
    world: ReachableState,
    first: list[Any],
    changes: Sequence[Change],
    value: Callable[[Change], Any],
) -> bool:
    """Whether a call computes something else where only these slots hold another value."""
    world.restore()
    for change in changes:
        change.slot.write(value(change))
    try:
        return not _same(first, _computed(model, call))
    except Exception:  # the person's own code, on a number that it does not expect: it has read it
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _computed(model: torch.nn.Module, call: Call) -> list[Any]:
    """What a call computes, from the same random state and buffers."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _buffers_kept(model):
        torch.manual_seed(0)
        found = pytree.tree_leaves(call())
        return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]


@contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Buffers have their values back afterwards, and are the ones that they were."""
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


def _same(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(map(_equal, one, two))


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())
    return isinstance(one, torch.Tensor) == isinstance(two, torch.Tensor)
