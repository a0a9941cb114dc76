"""Programs: what one worker executes, as finite text.

A program is three blocks, or four, or one, of instructions over a running micro-batch number ``g``::

    worker 0 of 2
    window run
    lag 1
    tapes 2
    registers 2
    channel 0 forward 0>1 slots 2
    channel 1 gradient 1>0 slots 2
    warm-up
      read g
      forward g gives 0 distance crossed mode recompute
    steady
      read g+1
      forward g+1 gives 0 distance crossed mode recompute
      backward g takes 1 weights live mode recompute
      update g
    drain
      backward g takes 1 weights live mode recompute
      update g

In a window (one batch, or the whole run) the warm-up block runs ``lag`` times, the steady block until the window's last
forward is done, wherever that is, and the drain block until nothing is in flight. ``update`` acts only where g ends its
batch.

A program with ``backward-weight`` runs its backwards in two halves: ``backward`` makes the gradients of the stage's
inputs and owes the rest to ``backward-weight``, some micro-batches later (``g-2``; none before the window's first). A
fourth block, the tail, then runs until nothing is owed.

Where the norm of the whole model's gradient is needed, ``grad-norm-sq`` sends the squared norm of the stage's gradients
to stage 0, once they are complete; like ``update`` it acts only where g ends its batch.

A worker that reads has ``registers``, each room for a batch of data: its reader, a thread, loads one batch while
another is in use, and stops where no register is free. ``read`` takes the next micro-batch from them.

A worker with two stages is at different micro-batches on them, and no block over one ``g`` says how they take turns.
Its program has one block, the order, written out for a whole window, and on every line the stage that it acts on::

    worker 1 of 2
    window batch
    tapes 3
    owed 3
    channel 0 forward 0>1 slots 4
    ...
    order
      forward g stage 1 takes 0 gives 2 mode stash
      forward g stage 2 takes 2 gives 4 mode stash
      ...

It runs once per window, ``g`` being the window's first micro-batch; what lies behind the last one is passed over.

Every instruction is an actor (OneFlow, Sect. 4): it fires when each channel it takes from holds g's message and
each channel it gives to has a free slot; a slot is its register, and a consumer without a free one stops its producer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, get_args

from roundelay.errors import PlanError

Opcode = Literal["read", "forward", "backward", "backward-weight", "grad-norm-sq", "update"]
ChannelKind = Literal["forward", "gradient", "grad-norm-sq", "grad-norm"]

PER_BATCH = ("grad-norm-sq", "grad-norm")
"""Channels that carry one number per batch, and no tensor."""

ONCE_A_BATCH = frozenset({"grad-norm-sq", "update"})
"""Opcodes that act on a batch, where its last micro-batch is, and on no other micro-batch."""

FRESH, PREVIOUS, ENTRY = "f", "p", "entry"
"""What `Instruction.reads` is made of."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A queue of messages between two stages, one message per micro-batch; of squares and norms, one per batch.

    Args:
        id: number, the same on both sides.
        kind: what it carries: activations, gradients, the squared norm of a stage's gradients, or the norm of all.
        source: the stage that sends.
        target: the stage that receives.
        slots: messages that may be on the way or unread at one time.
    """

    id: int
    kind: ChannelKind
    source: int
    target: int
    slots: int

    def __str__(self) -> str:
        return f"channel {self.id} {self.kind} {self.source}>{self.target} slots {self.slots}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        opcode: what to do.
        offset: it acts on micro-batch g + offset; on none where that lies before the window.
        takes: channels whose message for that micro-batch it consumes.
        gives: channels to which it sends a message.
        reads: for a forward, which version it reads: ``entry`` (the one that stage 0 read), or a letter for each
            micro-batch of a batch, ``f`` for W[t] and ``p`` for W[t-1]; empty for the newest.
        weights: for a backward, which weights it reads: ``forward`` (those of its forward), ``live``, or ``ahead``
            (those predicted from the live ones); else empty.
        distance: how far weights are predicted: ``crossed`` (the updates between now and the backward), ``crossed+N``
            (those up to N micro-batches behind it), or a number; empty for not at all.
        mode: backward mode of a forward and its backward; else empty.
        stage: the stage that it acts on; None where the worker has one alone, which is of its own number.
    """

    opcode: Opcode
    offset: int
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    reads: str = ""
    weights: str = ""
    distance: str = ""
    mode: str = ""
    stage: int | None = None

    def __str__(self) -> str:
        words = [self.opcode, f"g{self.offset:+d}" if self.offset else "g"]
        if self.stage is not None:
            words += ["stage", str(self.stage)]
        for word, channels in (("takes", self.takes), ("gives", self.gives)):
            if channels:
                words += [word, ",".join(map(str, channels))]
        for word in ("reads", "weights", "distance", "mode"):
            value = getattr(self, word)
            if value:
                words += [word, value]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Program:
    """What one worker executes; see the module's docstring.

    Args:
        worker: its number.
        num_workers: of how many.
        window: ``batch`` or ``run``.
        lag: repetitions of the warm-up block; 0 where there is an order.
        tapes: forwards that may wait for their backward at one time.
        channels: those it takes from or gives to.
        warm_up: block.
        steady: block.
        drain: block.
        owed: backwards that may wait for their weights' half at one time; 0 where a backward is whole.
        tail: block, empty where no such half is left when all backwards are done.
        registers: batches of data in use, waiting, or being loaded; 0 where nothing is read.
        order: block, in the place of all others where the worker has several stages; else empty.
    """

    worker: int
    num_workers: int
    window: str
    lag: int
    tapes: int
    channels: tuple[Channel, ...]
    warm_up: tuple[Instruction, ...]
    steady: tuple[Instruction, ...]
    drain: tuple[Instruction, ...]
    owed: int = 0
    tail: tuple[Instruction, ...] = ()
    registers: int = 0
    order: tuple[Instruction, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages that the worker runs."""
        return tuple(sorted({i.stage for i in self.order if i.stage is not None})) or (self.worker,)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Those of all blocks, each as often as it stands there."""
        return (*self.warm_up, *self.steady, *self.drain, *self.tail, *self.order)

    def __str__(self) -> str:
        lines = [f"worker {self.worker} of {self.num_workers}", f"window {self.window}"]
        lines += [*([] if self.order else [f"lag {self.lag}"]), f"tapes {self.tapes}"]
        counts = {"owed": self.owed, "registers": self.registers}
        lines += [*(f"{name} {count}" for name, count in counts.items() if count), *map(str, self.channels)]
        blocks = {"warm-up": self.warm_up, "steady": self.steady, "drain": self.drain}
        shown = {"order": self.order} if self.order else blocks | ({"tail": self.tail} if self.tail else {})
        for title, block in shown.items():
            lines += [title, *(f"  {instruction}" for instruction in block)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str) -> Program:
        """The program that prints as ``text``.

        Raises:
            PlanError: naming the line that no program has.
        """
        heads: dict[str, tuple[str, ...]] = {}
        channels: list[Channel] = []
        blocks: dict[str, list[Instruction]] = {name: [] for name in ("warm-up", "steady", "drain", "tail", "order")}
        block: list[Instruction] | None = None
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            words = line.split()
            try:
                if line in blocks:
                    block = blocks[line]
                elif line.startswith("  ") and block is not None:
                    block.append(_instruction(words))
                elif words[0] == "channel":
                    channels.append(_channel(words))
                else:
                    heads[words[0]] = _head(words[0], line)
            except (IndexError, KeyError, ValueError) as error:
                raise _bad_line(number, line) from error
        optional = (*_MAY_BE_ABSENT, "lag") if blocks["order"] else _MAY_BE_ABSENT
        lacking = [name for name in _HEADS if name not in heads and name not in optional]
        if lacking:
            raise _bad_line(len(lines), f"the end, and no line {lacking[0]!r}")
        worker, num_workers = map(int, heads["worker"])
        program = Program(
            worker,
            num_workers,
            heads["window"][0],
            int(heads["lag"][0]) if "lag" in heads else 0,
            int(heads["tapes"][0]),
            tuple(channels),
            tuple(blocks["warm-up"]),
            tuple(blocks["steady"]),
            tuple(blocks["drain"]),
            int(heads["owed"][0]) if "owed" in heads else 0,
            tuple(blocks["tail"]),
            int(heads["registers"][0]) if "registers" in heads else 0,
            tuple(blocks["order"]),
        )
        for number, (line, printed) in enumerate(zip_longest(lines, str(program).splitlines(), fillvalue=""), 1):
            if line != printed:
                raise _bad_line(number, line)
        return program


_MAY_LIE_BEHIND = ("backward-weight", "grad-norm-sq", "update")
_MAY_BE_ABSENT = ("owed", "registers")
_HEADS = {
    "worker": re.compile(r"worker (\d+) of (\d+)"),
    "window": re.compile(r"window (batch|run)"),
    "lag": re.compile(r"lag (\d+)"),
    "tapes": re.compile(r"tapes (\d+)"),
    "owed": re.compile(r"owed (\d+)"),
    "registers": re.compile(r"registers (\d+)"),
}
_WORDS = {
    "stage": re.compile(r"\d+"),
    "takes": re.compile(r"\d+(,\d+)*"),
    "gives": re.compile(r"\d+(,\d+)*"),
    "reads": re.compile("entry|[fp]+"),
    "weights": re.compile("forward|live|ahead"),
    "distance": re.compile(r"crossed(\+\d+)?|\d+"),
    "mode": re.compile("stash|recompute|mixed"),
}


def _head(name: str, line: str) -> tuple[str, ...]:
    found = _HEADS[name].fullmatch(line)
    if found is None:
        raise ValueError(line)
    return found.groups()


def _channel(words: list[str]) -> Channel:
    source, target = words[3].split(">")
    if words[2] not in get_args(ChannelKind) or words[4] != "slots":
        raise ValueError(words)
    return Channel(int(words[1]), words[2], int(source), int(target), int(words[5]))  # type: ignore[arg-type]


def _instruction(words: list[str]) -> Instruction:
    if words[0] not in get_args(Opcode) or not words[1].startswith("g") or len(words) % 2:
        raise ValueError(words)
    named = dict(zip(words[2::2], words[3::2], strict=True))
    offset = int(words[1][1:] or 0)
    if offset < 0 and words[0] not in _MAY_LIE_BEHIND:
        raise ValueError(words)
    if not all(_WORDS[word].fullmatch(value) for word, value in named.items()):
        raise ValueError(words)
    return Instruction(
        opcode=words[0],  # type: ignore[arg-type]
        offset=offset,
        takes=tuple(int(c) for c in named.get("takes", "").split(",") if c),
        gives=tuple(int(c) for c in named.get("gives", "").split(",") if c),
        reads=named.get("reads", ""),
        weights=named.get("weights", ""),
        distance=named.get("distance", ""),
        mode=named.get("mode", ""),
        stage=int(named["stage"]) if "stage" in named else None,
    )


def _bad_line(number: int, line: str) -> PlanError:
    return PlanError(
        f"line {number} of a program",
        got=repr(line),
        expected="a line as `roundelay simulate --programs` prints it",
        remedy="Programs are made from plans; edit the plan instead.",
    )
