"""One holder's part in the exchanges of a tensor: a state machine that takes and returns messages, without I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.ir.exchange import Phase, bounds

Part = torch.Tensor | None
"""What one holder puts for another; None from a holder that has nothing to add."""


@final
class Piece(NamedTuple):
    """What one holder sends another in one phase.

    Args:
        target: position of the holder that gets it.
        number: of the exchange.
        phase: of the exchange.
        part: dense and contiguous; shared with the sender where the transport does not copy.
    """

    target: int
    number: int
    phase: int
    part: Part


@final
class Exchange:
    """The exchanges of one tensor among its holders, one after the other.

    Holders may be one exchange ahead of each other: what comes early waits.

    Args:
        phases: what is done in each exchange.
        position: of this holder among them.
        holders: how many there are.
    """

    def __init__(self, phases: Sequence[Phase], position: int, holders: int) -> None:
        self._phases, self._position, self._holders = tuple(phases), position, holders
        self._came: defaultdict[tuple[int, int], dict[int, Part]] = defaultdict(dict)  # by number and phase
        self._at: tuple[int, int] | None = None  # number and phase that runs
        self._results: dict[int, Part] = {}

    def start(self, number: int, tensor: Part) -> list[Piece]:
        """Put this holder's tensor into the exchange of that number; returns what to send.

        Args:
            number: of the exchange.
            tensor: contiguous, and not modified afterwards; None if this holder adds nothing to a sum.

        Raises:
            InternalError: the exchange before it is not complete.
        """
        if self._at is not None:
            raise self._bug(f"the start of exchange {number}", f"the end of exchange {self._at[0]}")
        return self._advance(self._put(number, 0, tensor))

    def take(self, source: int, number: int, phase: int, part: Part) -> list[Piece]:
        """Take what another holder has put for this one; returns what to send.

        Args:
            source: position of that holder.
            number: of the exchange.
            phase: of the exchange.
            part: what it has put.

        Raises:
            InternalError: it has put something there before.
        """
        came = self._came[number, phase]
        if source in came or not 0 <= source < self._holders:
            raise self._bug(f"a second part of holder {source} in exchange {number}", "one from each holder")
        came[source] = part
        return self._advance([])

    def finished(self, number: int) -> bool:
        """Whether the exchange of that number is complete."""
        return number in self._results

    def result(self, number: int) -> Part:
        """The tensor after an exchange, which is forgotten here; None if no holder had any."""
        return self._results.pop(number)

    def _put(self, number: int, phase: int, tensor: Part) -> list[Piece]:
        """Cut the tensor for the other holders, and keep the own part."""
        self._at = number, phase
        dim = self._phases[phase].put
        parts = [tensor] * self._holders
        if dim is not None and tensor is not None:
            cut = bounds(tensor.shape[dim], self._holders)
            parts = [tensor.narrow(dim, start, end - start).contiguous() for start, end in cut]
        self._came[number, phase][self._position] = parts[self._position]
        return [
            Piece(target, number, phase, parts[target]) for target in range(self._holders) if target != self._position
        ]

    def _advance(self, pieces: list[Piece]) -> list[Piece]:
        """End the phases for which everything is here, and put into the next."""
        while self._at is not None and len(self._came[self._at]) == self._holders:
            number, phase = self._at
            came = self._came.pop(self._at)
            combined = _combined(self._phases[phase], [came[position] for position in range(self._holders)])
            if phase + 1 < len(self._phases):
                pieces += self._put(number, phase + 1, combined)
            else:
                self._at = None
                self._results[number] = combined
        return pieces

    def _bug(self, got: str, expected: str) -> InternalError:
        return InternalError(
            f"holder {self._position} of {self._holders} in an exchange",
            got=got,
            expected=expected,
            remedy="Report this as a bug of Roundelay, with the plan.",
        )


def _combined(phase: Phase, parts: Sequence[Part]) -> Part:
    """Sum, in the order of the holders, or join."""
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    if phase.join is not None:
        return torch.cat(present, phase.join)
    total = torch.add(present[0], present[1])
    for part in present[2:]:
        total.add_(part)
    return total
