"""Sums over holders that share memory: each adds up its slice of what all have put there, in the order of the holders.

The memory has a block for each holder and one for the sum. A holder writes its own block, notifies the others, adds up
its slice of the sum when all have done so, notifies them again, and reads the sum when all have added theirs: an
all-reduce as :func:`roundelay.ir.exchange.all_reduce` with the same bits, without a copy on the way. A block is written
again only when all holders have read it, as nobody begins an exchange before all have announced the end of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import torch

from roundelay.errors import InternalError
from roundelay.ir.bucket import ALIGNMENT
from roundelay.ir.exchange import WEIGHT_GRADIENT, ExchangePlan, all_reduce
from roundelay.ir.sbp import bounds
from roundelay.ir.work import Work
from roundelay.runtime.collectives import Parts


def shared_bytes(works: Sequence[Work]) -> dict[int, int]:
    """Bytes of the memory of every exchange of gradients, by channel: a block for each holder, and one for the sum."""
    return {
        channel.id: (len(channel.sources) + 1) * bytes_of_block(exchange)
        for work in works
        for channel in work.program.channels
        if (exchange := work.exchanges.get(channel.id)) is not None and _sums_weights(exchange)
    }


def _sums_weights(exchange: ExchangePlan) -> bool:
    return exchange.kind == WEIGHT_GRADIENT and exchange.phases == all_reduce()


def bytes_of_block(exchange: ExchangePlan) -> int:
    """Bytes of the tensors of an exchange, each of them aligned."""
    return sum(size + -size % ALIGNMENT for size in exchange.sizes)


def block_of(memory: torch.Tensor, exchange: ExchangePlan, number: int) -> Parts:
    """The tensors of one block of an exchange's memory."""
    at, tensors = number * bytes_of_block(exchange), []
    for size, dtype in zip(exchange.sizes, exchange.dtypes, strict=True):
        tensors.append(memory[at : at + size].view(getattr(torch, dtype)))
        at += size + -size % ALIGNMENT
    return tuple(tensors)


@final
class PhaseDone(NamedTuple):
    """A holder's message to all others: what it has done of an exchange.

    Args:
        number: of the exchange.
        phase: 0: its block is written; 1: its slice is added up.
        present: whether it adds anything.
    """

    number: int
    phase: int
    present: bool


@final
class SharedSum:
    """One holder's part in the sums of an exchange: a state machine without I/O, on memory that others write to.

    Args:
        blocks: of the holders, in order.
        total: of the sum.
        position: of this holder among them.
    """

    def __init__(self, blocks: Sequence[Parts], total: Parts, position: int) -> None:
        self._blocks, self._total, self._position = blocks, total, position
        self._done: dict[tuple[int, int], dict[int, bool]] = {}
        self._at: tuple[int, int] | None = None
        self._results: dict[int, Parts] = {}

    @property
    def own(self) -> Parts:
        """The block to write before :meth:`start`."""
        return self._blocks[self._position]

    def start(self, number: int, present: bool) -> list[PhaseDone]:
        """Begin the exchange of that number; returns what to tell all others.

        Args:
            number: of the exchange.
            present: whether the own block is written; if not, this holder adds nothing.

        Raises:
            InternalError: the exchange before it is not complete.
        """
        if self._at is not None:
            raise self._bug(f"the start of exchange {number}", f"the end of exchange {self._at[0]}")
        return self._advance(self._announce(number, 0, present))

    def take(self, source: int, done: PhaseDone) -> list[PhaseDone]:
        """Take another holder's message; returns those to all others.

        Raises:
            InternalError: it has come before.
        """
        known = self._done.setdefault((done.number, done.phase), {})
        if source in known or not 0 <= source < len(self._blocks):
            raise self._bug(f"a second word of holder {source} on exchange {done.number}", "one from each holder")
        known[source] = done.present
        return self._advance([])

    def finished(self, number: int) -> bool:
        """Whether the exchange of that number is complete."""
        return number in self._results

    def result(self, number: int) -> Parts:
        """The sums; none if no holder had any. They are overwritten after this holder's next start."""
        return self._results.pop(number)

    def _announce(self, number: int, phase: int, present: bool) -> list[PhaseDone]:
        self._at = number, phase
        self._done.setdefault((number, phase), {})[self._position] = present
        return [PhaseDone(number, phase, present)]

    def _advance(self, words: list[PhaseDone]) -> list[PhaseDone]:
        while self._at is not None and len(self._done.get(self._at, ())) == len(self._blocks):
            number, phase = self._at
            known = self._done.pop(self._at)
            present = [position for position in range(len(self._blocks)) if known[position]]
            if phase == 0:
                self._add(present)
                words += self._announce(number, 1, bool(present))
            else:
                self._at = None
                self._results[number] = self._total if present else ()
        return words

    def _add(self, present: Sequence[int]) -> None:
        """Add up this holder's slice of every tensor, in the order of the holders."""
        for i, total in enumerate(self._total):
            start, end = bounds(len(total), len(self._blocks))[self._position]
            parts, out = [self._blocks[position][i][start:end] for position in present], total[start:end]
            if len(parts) == 1:
                out.copy_(parts[0])
            elif parts:
                torch.add(parts[0], parts[1], out=out)
                for part in parts[2:]:
                    out.add_(part)

    def _bug(self, got: str, expected: str) -> InternalError:
        return InternalError(
            f"holder {self._position} of {len(self._blocks)} in a sum",
            got=got,
            expected=expected,
            remedy="Report this as a bug of Roundelay, with the plan.",
        )
