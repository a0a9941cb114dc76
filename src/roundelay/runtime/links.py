"""A worker's ends of its channels: where an instruction's messages go, and what becomes of those that arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from roundelay.ir.exchange import ExchangePlan, all_reduce
from roundelay.ir.program import Channel
from roundelay.runtime.collectives import Exchange, Parts, Piece
from roundelay.runtime.shm_allreduce import PhaseDone, SharedSum, block_of
from roundelay.runtime.shm_chained_sums import SumBlocks
from roundelay.transport.endpoint import Endpoint, Message

Deliver = Callable[[Message], None]
"""Puts a complete message into the inbox of the stage that takes it, and tells the machine."""

Room = Callable[[int], Parts]
"""From a batch to the tensors to write."""

Free = Callable[[int], None]
"""Tells the machine that a slot of a channel is free."""


class Link(ABC):
    """One channel as one worker sees it."""

    @abstractmethod
    def give(self, message: Message) -> int:
        """Pass on what an instruction gives; returns the bytes sent."""

    @abstractmethod
    def arrived(self, source: int, message: Message) -> None:
        """Take what another worker has sent."""

    @abstractmethod
    def free(self, g: int) -> None:
        """Free the slot of a message that an instruction on micro-batch g has taken."""

    @property
    def room(self) -> Room | None:
        """Where an instruction writes the tensors that it gives; None: into memory of its own."""
        return None


@final
class LocalLink(Link):
    """A channel between two stages of this worker."""

    def __init__(self, channel: Channel, deliver: Deliver, free: Free) -> None:
        self._id, self._deliver, self._free = channel.id, deliver, free

    def give(self, message: Message) -> int:
        """Deliver it at once."""
        self._deliver(message)
        return 0

    def arrived(self, source: int, message: Message) -> None:
        """No other worker sends here."""
        raise AssertionError(message)

    def free(self, g: int) -> None:
        """The producer is this worker's own."""
        self._free(self._id)


@final
class PeerLink(Link):
    """A channel to or from another worker."""

    def __init__(self, channel: Channel, endpoint: Endpoint, deliver: Deliver) -> None:
        self._channel, self._endpoint, self._deliver = channel, endpoint, deliver

    def give(self, message: Message) -> int:
        """Send it to the target whose turn it is."""
        return self._endpoint.send(self._channel.target_of(message.header[0]).worker, message)

    def arrived(self, source: int, message: Message) -> None:
        """Deliver it."""
        self._deliver(message)

    def free(self, g: int) -> None:
        """Grant a credit to the producer that will fill the slot next."""
        self._endpoint.grant(self._channel.refilled_by(g).worker, self._channel.id)


@final
class SumLink(Link):
    """A channel on which sums are handed to another worker in memory that both share; messages have a block's number.

    Bytes are counted as if they were sent. Sums that lie elsewhere are sent.
    """

    def __init__(self, channel: Channel, endpoint: Endpoint, deliver: Deliver, blocks: SumBlocks) -> None:
        self._peer, self._id, self._endpoint = PeerLink(channel, endpoint, deliver), channel.id, endpoint
        self._deliver, self._blocks = deliver, blocks

    @property
    def room(self) -> Room:
        """The block of each batch."""
        return self._blocks.of_batch

    def give(self, message: Message) -> int:
        """Tell the target in which block the sum is."""
        number = self._blocks.find(message.values)  # type: ignore[arg-type]
        if number is None:
            return self._peer.give(message)
        self._peer.give(message._replace(values=(number,)))
        self._endpoint.count_shared(self._id, self._blocks.num_bytes, 0)
        return self._blocks.num_bytes

    def arrived(self, source: int, message: Message) -> None:
        """Deliver the sum that is in that block."""
        if message.values and isinstance(message.values[0], int):
            message = message._replace(values=self._blocks[message.values[0]])
            self._endpoint.count_shared(self._id, 0, self._blocks.num_bytes)
        self._deliver(message)

    def free(self, g: int) -> None:
        """Grant a credit to the producer."""
        self._peer.free(g)


@final
class ExchangeLink(Link):
    """An exchange with the other holders of a stage.

    Its messages have the number of the exchange and of the phase as header, and the parts as values. What is complete
    is delivered like the message of another worker, with that number as header.
    """

    def __init__(self, channel: Channel, worker: int, endpoint: Endpoint, deliver: Deliver, free: Free) -> None:
        self._id, self._endpoint, self._deliver, self._free = channel.id, endpoint, deliver, free
        self._holders = [port.worker for port in channel.sources]
        self._exchange = Exchange(channel.phases, self._holders.index(worker), len(self._holders))

    def give(self, message: Message) -> int:
        """Start the exchange with what this worker has."""
        number = message.header[0]
        return self._go_on(number, self._exchange.start(number, message.values))  # type: ignore[arg-type]

    def arrived(self, source: int, message: Message) -> None:
        """Take another holder's part."""
        number, phase = message.header
        position = self._holders.index(source)
        self._go_on(number, self._exchange.take(position, number, phase, message.values))  # type: ignore[arg-type]

    def free(self, g: int) -> None:
        """This worker may start the next exchange."""
        self._free(self._id)

    def _go_on(self, number: int, pieces: list[Piece]) -> int:
        sent = 0
        for target, of, phase, parts in pieces:
            sent += self._endpoint.send(self._holders[target], Message(self._id, (of, phase), parts))
        if self._exchange.finished(number):
            self._deliver(Message(self._id, (number,), self._exchange.result(number)))
        return sent


@final
class SharedLink(Link):
    """A sum with other holders of a stage, in memory that they share.

    Its messages have the number of the exchange and what is done of it as header. What an instruction gives must be in
    :attr:`room`, or nothing; the sums are delivered as by :class:`ExchangeLink`. Bytes are counted as if they were
    sent.

    Args:
        channel: the exchange.
        worker: this one.
        endpoint: its own.
        deliver: puts the sums into the inbox.
        free: tells the machine that the next may begin.
        memory: of all holders, and of the sum.
        sent: bytes that this worker would send in each phase.
    """

    def __init__(
        self,
        channel: Channel,
        worker: int,
        endpoint: Endpoint,
        deliver: Deliver,
        free: Free,
        memory: tuple[Sequence[Parts], Parts],
        sent: Sequence[int],
    ) -> None:
        self._id, self._endpoint, self._deliver, self._free = channel.id, endpoint, deliver, free
        self._holders, self._worker, self._bytes = [port.worker for port in channel.sources], worker, sent
        self._sum = SharedSum(*memory, self._holders.index(worker))

    @property
    def room(self) -> Room:
        """This holder's block, for every batch."""
        return lambda batch: self._sum.own

    def give(self, message: Message) -> int:
        """Start the sum with what is in the room."""
        return self._go_on(message.header[0], self._sum.start(message.header[0], bool(message.values)))

    def arrived(self, source: int, message: Message) -> None:
        """Another holder has written its block, or added up its slice."""
        number, phase, present = message.header
        self._go_on(number, self._sum.take(self._holders.index(source), PhaseDone(number, phase, bool(present))))

    def free(self, g: int) -> None:
        """This worker may start the next."""
        self._free(self._id)

    def _go_on(self, number: int, words: list[PhaseDone]) -> int:
        sent = 0
        for done in words:
            for holder in self._holders:
                if holder != self._worker:
                    self._endpoint.send(holder, Message(self._id, (done.number, done.phase, int(done.present)), ()))
            sent += self._bytes[done.phase] if done.present else 0
        if sent:
            self._endpoint.count_shared(self._id, sent, sent)
        if self._sum.finished(number):
            self._deliver(Message(self._id, (number,), self._sum.result(number)))
        return sent


def open_link(
    channel: Channel,
    worker: int,
    endpoint: Endpoint,
    planned: ExchangePlan | None,
    deliver: Deliver,
    free: Free,
    blocks: SumBlocks | None = None,
) -> Link:
    """A worker's end of a channel.

    Args:
        channel: from or to the worker.
        worker: its number.
        endpoint: its own.
        planned: the exchange that the channel is, if it is one.
        deliver: puts what is complete into an inbox.
        free: tells of a free slot where no other worker does.
        blocks: where the channel's sums lie, if the holders share memory for them.
    """
    if channel.phases:
        memory = endpoint.shared(channel.id)
        if memory is None or planned is None or channel.phases != all_reduce():
            return ExchangeLink(channel, worker, endpoint, deliver, free)
        holders = [port.worker for port in channel.sources]
        own = [block_of(memory, planned, number) for number in range(len(holders) + 1)]
        sent = planned.bytes_sent(len(holders), holders.index(worker))
        return SharedLink(channel, worker, endpoint, deliver, free, (own[:-1], own[-1]), sent)
    if channel.filled_by(worker) and channel.read_by(worker):
        return LocalLink(channel, deliver, free)
    return PeerLink(channel, endpoint, deliver) if blocks is None else SumLink(channel, endpoint, deliver, blocks)
