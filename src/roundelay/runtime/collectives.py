"""One holder's part in the exchanges of a channel: a state machine that takes and returns messages, without I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.ir.exchange import Phase
from roundelay.ir.sbp import Reduction, bounds

Parts = tuple[torch.Tensor, ...]
"""What one holder puts for another, a part of each tensor; empty from a holder that adds nothing to a sum."""


@final
class Piece(NamedTuple):
    """What one holder sends another in one phase.

    Args:
        target: position of the holder that gets it.
        number: of the exchange.
        phase: of the exchange.
        parts: dense and contiguous; shared with the sender where the transport does not copy.
    """

    target: int
    number: int
    phase: int
    parts: Parts


@final
class Exchange:
    """The exchanges of the same tensors among their holders, one after the other.

    Holders may be one exchange ahead of each other: what comes early waits.

    Args:
        phases: what is done in each exchange.
        position: of this holder among them.
        holders: how many there are.
    """

    def __init__(self, phases: Sequence[Phase], position: int, holders: int) -> None:
        self._phases, self._position, self._holders = tuple(phases), position, holders
        self._came: defaultdict[tuple[int, int], dict[int, Parts]] = defaultdict(dict)  # by number and phase
        self._at: tuple[int, int] | None = None  # number and phase that runs
        self._results: dict[int, Parts] = {}

    def start(self, number: int, tensors: Parts) -> list[Piece]:
        """Put this holder's tensors into the exchange of that number; returns what to send.

        Args:
            number: of the exchange.
            tensors: contiguous, and not modified afterwards; empty if this holder adds nothing to a sum.

        Raises:
            InternalError: the exchange before it is not complete.
        """
        if self._at is not None:
            raise self._bug(f"the start of exchange {number}", f"the end of exchange {self._at[0]}")
        return self._advance(self._put(number, 0, tensors))

    def take(self, source: int, number: int, phase: int, parts: Parts) -> list[Piece]:
        """Take what another holder has put for this one; returns what to send.

        Args:
            source: position of that holder.
            number: of the exchange.
            phase: of the exchange.
            parts: what it has put.

        Raises:
            InternalError: it has put something there before.
        """
        came = self._came[number, phase]
        if source in came or not 0 <= source < self._holders:
            raise self._bug(f"a second part of holder {source} in exchange {number}", "one from each holder")
        came[source] = parts
        return self._advance([])

    def finished(self, number: int) -> bool:
        """Whether the exchange of that number is complete."""
        return number in self._results

    def result(self, number: int) -> Parts:
        """The tensors after an exchange, which are forgotten here; empty if no holder had any."""
        return self._results.pop(number)

    def _put(self, number: int, phase: int, tensors: Parts) -> list[Piece]:
        """Cut the tensors for the other holders, and keep the own part."""
        self._at = number, phase
        dim = self._phases[phase].put
        parts = [tensors] * self._holders if dim is None else _cut(tensors, dim, self._holders)
        self._came[number, phase][self._position] = parts[self._position]
        return [
            Piece(target, number, phase, parts[target]) for target in range(self._holders) if target != self._position
        ]

    def _advance(self, pieces: list[Piece]) -> list[Piece]:
        """End the phases for which everything is here, and put into the next."""
        while self._at is not None and len(self._came[self._at]) == self._holders:
            number, phase = self._at
            came = self._came.pop(self._at)
            combined = self._combined(self._phases[phase], [came[position] for position in range(self._holders)])
            if phase + 1 < len(self._phases):
                pieces += self._put(number, phase + 1, combined)
            else:
                self._at = None
                self._results[number] = combined
        return pieces

    def _combined(self, phase: Phase, parts: Sequence[Parts]) -> Parts:
        """Reduce, in the order of the holders, or join."""
        present = [of_holder for of_holder in parts if of_holder]
        if len(present) < 2:
            return present[0] if present else ()
        if len({len(of_holder) for of_holder in present}) > 1:
            raise self._bug("holders with different numbers of tensors", "the same tensors from each")
        if phase.join is not None:
            return tuple([torch.cat(of_tensor, phase.join) for of_tensor in zip(*present, strict=True)])
        if any(len({part.shape for part in of_tensor}) > 1 for of_tensor in zip(*present, strict=True)):
            raise self._bug("parts of different shapes", "the same shape from each holder, as they are reduced")
        return tuple([_REDUCED[phase.op](of_tensor) for of_tensor in zip(*present, strict=True)])

    def _bug(self, got: str, expected: str) -> InternalError:
        return InternalError(
            f"holder {self._position} of {self._holders} in an exchange",
            got=got,
            expected=expected,
            remedy="Report this as a bug of Roundelay, with the plan.",
        )


def _cut(tensors: Parts, dim: int, holders: int) -> list[Parts]:
    """For each holder its part of each tensor."""
    if not tensors:
        return [()] * holders
    cut = [
        [tensor.narrow(dim, start, end - start).contiguous() for start, end in bounds(tensor.shape[dim], holders)]
        for tensor in tensors
    ]
    return list(zip(*cut, strict=True))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def _max(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.maximum, parts)


_REDUCED: Mapping[Reduction, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {"sum": _sum, "max": _max}
