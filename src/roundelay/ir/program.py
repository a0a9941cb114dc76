"""Programs: what one worker executes, as finite text.

A program is one software-pipelined loop (a modulo schedule): a body of lines, each with an offset, over a running
micro-batch number ``g``::

    worker 0 of 2
    loop every 1 over run
    tapes 2
    registers 2
    channel 0 forward 0.0>1.1 slots 2
    channel 1 gradient 1.1>0.0 slots 2
    body
      read 0 g+1
      forward 0 g+1 gives 0 distance crossed mode recompute
      backward 0 g takes 1 weights live mode recompute
      update 0 g

``forward 0 g+1`` is the forward of stage 0 on micro-batch g + 1. A *window* is one batch, or the whole run, or, as
``slots``, the whole run with M micro-batches in each batch: those that a short one lacks have no rows. In it the body
runs once for every K-th micro-batch (``every K``), from the turn in which a line first meets the window's first
micro-batch to the one in which a line last meets its last. A line whose micro-batch lies outside of the window is
passed over, so that warm-up and drain are the same body. ``update`` acts only where g ends its batch.

Where a backward runs in two halves, ``backward`` computes the gradients of the stage's inputs, and ``backward-weight``
those of its weights, some micro-batches later. Where the norm of the whole model's gradient is needed, ``grad-norm-sq``
sends the squared norm of the stage's gradients to stage 0, once they are complete; it acts only where g ends its batch.

A worker that reads has ``registers``, each room for one batch of data: its reader, a thread, loads one batch while
another is in use, and stops where no register is free. ``read`` takes the next micro-batch from them.

A worker with several stages takes turns among them: its body is long, and ``every`` says how many micro-batches it
covers. ``zb-v`` writes a whole batch out (``every M over batch``).

``loop free over run`` has no order: a forward with what precedes it runs when it can, and so does a backward with what
follows it, gradients first (:mod:`roundelay.actor.free`). Its ``tapes`` are the forwards that may be in flight.

A channel joins *ports*, each a stage on a worker: ``channel 0 forward 0.0>1.1`` goes from stage 0 on worker 0 to
stage 1 on worker 1. Where several workers hold a stage, an *exchange* is a channel from all of its ports to all::

    channel 4 weight-gradient 0.0,2.0>0.0,2.0 slots 1 by reduce-scatter(0),all-gather(0)

``box 0 g gives 4`` starts it with what this worker has, and ``unbox 0 g takes 4`` waits for what it has afterwards
(OneFlow, Sect. 3.2). Where a value is boxed within a stage, ``box 0 g of add_5_box gives 7`` stands between
``forward 0 g segments 0:3`` and ``forward 0 g segments 3:6``, and the like in the backward.

Instead, gradients may be summed over time (Cyclic Data Parallelism, Sect. 4.2). ``sum 0 g takes 5 gives 6`` ends a
batch on a holder: it adds what this one has to the partial sum of those before it, and sends that to the next. The last
one's is the total, which ``share 0 g takes 7 gives 8`` takes, keeps for its update, and passes on.

Where the holders of two stages take micro-batches in turns, a channel between them is *dealt*: micro-batch g goes from
its g-th source to its g-th target, counted modulo their numbers::

    channel 2 forward 0.0,1.0,2.0>3.1,4.1 slots 1

A slot is then one at each target, and is granted to the source that will fill it next. ``deal 0 g+1 gives 9`` reads a
micro-batch and gives it to the holder whose turn it is.

A stage's *state*, its weights, buffers and sums of gradients, may go from holder to holder (Sect. 4.4): ``hold 0 g
takes 10`` waits for it, ``pass 0 g gives 11`` hands it on, and ``holds 0,3`` says with which a worker begins. As a
worker hands on what it has no micro-batch for, too, such a channel carries messages beyond the window::

    channel 11 state 0.0>1.0 slots 1 within -1:1

Every instruction is an actor (OneFlow, Sect. 4): it fires when each channel it takes from holds g's message and each
channel it gives to has a free slot; a slot is its register, and a consumer without a free one stops its producer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple, final, get_args

from roundelay.errors import PlanError
from roundelay.ir.exchange import Phase

Opcode = Literal[
    "read",
    "deal",
    "forward",
    "backward",
    "backward-weight",
    "box",
    "unbox",
    "sum",
    "share",
    "hold",
    "pass",
    "grad-norm-sq",
    "update",
]
ChannelKind = Literal[
    "data",
    "forward",
    "gradient",
    "boxed",
    "boxed-gradient",
    "weight-gradient",
    "gradient-parts",
    "weight",
    "weight-forward",
    "weight-backward",
    "partial",
    "total",
    "state",
    "state-back",
    "grad-norm-sq",
    "grad-norm",
]
Window = Literal["batch", "run", "slots"]

EDGES = ("forward", "gradient")
"""Channels that carry the values of an edge between two stages."""

EXCHANGES: tuple[ChannelKind, ...] = (
    *("weight-gradient", "boxed", "boxed-gradient", "weight", "gradient-parts"),
    *("weight-forward", "weight-backward"),
)
"""Channels that are exchanges among holders of a stage."""

SUMS = ("partial", "total")
"""Channels that carry gradients summed over some or all holders of a stage, once a batch."""

STATES = ("state", "state-back")
"""Channels that carry a stage's state, to where its forward is due, and to where its backward is."""

SCALARS = ("grad-norm-sq", "grad-norm")
"""Channels that carry one number per batch, and no tensor."""

SEGMENT, GRADIENTS = "segment ", "gradients "
"""In place of a boxed value: a segment's weights, with its number; their gradients of one micro-batch."""

END = 9999
"""In place of a stage's number of segments, which no program has to know."""

FRESH, PREVIOUS, NEITHER, KEPT, ENTRY = "f", "p", "-", "k", "entry"
"""What `Instruction.reads` is made of."""


@final
class OpcodeInfo(NamedTuple):
    """What everything but the handlers needs to know about an opcode.

    Args:
        letter: in schedules and traces.
        share: the share of a worker's time that it counts to: ``forward``, ``backward``, ``update``, or ``data``.
        once_a_batch: whether it acts only on the last micro-batch of a batch.
        scheduled: whether a schedule orders it; the others stand next to one that is.
    """

    letter: str
    share: str
    once_a_batch: bool = False
    scheduled: bool = True


OPCODES: dict[str, OpcodeInfo] = {
    "read": OpcodeInfo("R", "data", scheduled=False),
    "deal": OpcodeInfo("D", "data", scheduled=False),
    "forward": OpcodeInfo("F", "forward"),
    "backward": OpcodeInfo("B", "backward"),
    "backward-weight": OpcodeInfo("W", "backward"),
    "box": OpcodeInfo("X", "backward", once_a_batch=True, scheduled=False),
    "unbox": OpcodeInfo("Y", "backward", once_a_batch=True, scheduled=False),
    "sum": OpcodeInfo("A", "backward", once_a_batch=True),
    "share": OpcodeInfo("T", "backward", once_a_batch=True),
    "hold": OpcodeInfo("H", "data", scheduled=False),
    "pass": OpcodeInfo("P", "data", scheduled=False),
    "grad-norm-sq": OpcodeInfo("S", "backward", once_a_batch=True, scheduled=False),
    "update": OpcodeInfo("U", "update", once_a_batch=True),
}
"""Every opcode; their handlers are ``runtime.handlers.HANDLERS``."""


@final
class Port(NamedTuple):
    """An end of a channel: a stage on a worker, printed as ``worker.stage``."""

    worker: int
    stage: int

    def __str__(self) -> str:
        return f"{self.worker}.{self.stage}"


@dataclass(frozen=True, slots=True)
class Channel:
    """A queue of messages between ports: one per micro-batch, or one per batch for weights' gradients and norms.

    Args:
        id: number, the same at all ports.
        kind: what it carries: micro-batches of another replica, activations, gradients, gradients of weights, partial
            or total sums of these, a stage's state, the squared norm of its gradients, or the norm of all.
        sources: the ports that send: one, those that take turns, or in an exchange those of all holders, in order.
        targets: the ports that receive, likewise.
        slots: messages that may be on the way to a target or unread at one time.
        phases: of an exchange; empty for a channel from one port to another.
        within: by how much the first and the last message lie beyond the first and the last micro-batch of the window.
    """

    id: int
    kind: ChannelKind
    sources: tuple[Port, ...]
    targets: tuple[Port, ...]
    slots: int
    phases: tuple[Phase, ...] = ()
    within: tuple[int, int] = (0, 0)

    def filled_by(self, worker: int) -> bool:
        """Whether this worker sends on it."""
        return any(port.worker == worker for port in self.sources)

    def read_by(self, worker: int) -> bool:
        """Whether this worker receives from it."""
        return any(port.worker == worker for port in self.targets)

    @property
    def dealt(self) -> bool:
        """Whether ports take turns on it."""
        return not self.phases and len(self.sources) + len(self.targets) > 2

    def source_of(self, g: int) -> Port:
        """The port that sends the message of micro-batch g, on a channel that is no exchange."""
        return self.sources[g % len(self.sources)]

    def target_of(self, g: int) -> Port:
        """The port that receives it."""
        return self.targets[g % len(self.targets)]

    def refilled_by(self, g: int) -> Port:
        """The port whose message will fill the slot that the message of micro-batch g leaves."""
        return self.source_of(g + self.slots * len(self.targets))

    def __str__(self) -> str:
        ends = ">".join([",".join(map(str, ports)) for ports in (self.sources, self.targets)])
        by = f" by {','.join(map(str, self.phases))}" if self.phases else ""
        within = f" within {self.within[0]}:{self.within[1]}" if any(self.within) else ""
        return f"channel {self.id} {self.kind} {ends} slots {self.slots}{by}{within}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a body.

    Args:
        opcode: what to do.
        stage: the stage that it acts on.
        offset: it acts on micro-batch g + offset; on none where that lies outside of the window.
        takes: channels whose message for that micro-batch it consumes.
        gives: channels to which it sends a message.
        reads: for a forward, which version it reads: ``entry`` (the one that stage 0 read), or a letter for each
            micro-batch of a batch: ``f`` for W[t], ``p`` for W[t-1], ``-`` if it is another worker's; empty for the
            newest. A ``k`` at the end says that the version before the newest is kept for others, to whom the stage's
            state goes.
        weights: for a backward, and what gathers its weights, which it reads: ``forward`` (those of its forward),
            ``live``, or ``ahead`` (those predicted from the live ones); for a forward, ``forward`` where it must keep
            them for that, as its tape has none; else empty.
        distance: how far weights are predicted: ``crossed`` (the updates between now and the backward), ``crossed+N``
            (those up to N micro-batches after it), or a number; empty for not at all.
        mode: backward mode of a forward and its backward; else empty.
        of: the value that is boxed, or whose gradient is; ``segment N`` for the weights of a segment, ``gradients
            N`` for their gradients of one micro-batch; empty for what is exchanged once a batch.
        segments: which of the stage's segments a forward or a backward runs, as ``START:STOP``; empty for all.
    """

    opcode: Opcode
    stage: int
    offset: int
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    reads: str = ""
    weights: str = ""
    distance: str = ""
    mode: str = ""
    of: str = ""
    segments: str = ""

    @property
    def runs_first(self) -> bool:
        """Whether a forward or a backward runs the stage's first segment: a forward's beginning, a backward's end."""
        return not self.segments or self.segments.startswith("0:")

    @property
    def runs_last(self) -> bool:
        """Whether a forward or a backward runs the stage's last segment: a forward's end, a backward's beginning."""
        return not self.segments or self.segments.endswith(f":{END}")

    @property
    def continues(self) -> bool:
        """Whether it is a part of a forward or backward that another part has begun."""
        return not (self.runs_last if self.opcode == "backward" else self.runs_first)

    @property
    def reads_forward(self) -> bool:
        """Whether it acts with the weights of a forward: a forward itself, or what gathers weights for one."""
        return self.opcode == "forward" or (self.of.startswith(SEGMENT) and not self.weights)

    @property
    def once_a_batch(self) -> bool:
        """Whether it acts only on the last micro-batch of a batch."""
        return OPCODES[self.opcode].once_a_batch and not self.of

    def __str__(self) -> str:
        words = [self.opcode, str(self.stage), f"g{self.offset:+d}" if self.offset else "g"]
        for word, channels in (("takes", self.takes), ("gives", self.gives)):
            if channels:
                words += [word, ",".join(map(str, channels))]
        for word in ("reads", "weights", "distance", "mode", "of", "segments"):
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
        every: micro-batches from one turn of the loop to the next; 0 where the order is free.
        over: the window: ``batch``, ``run`` or ``slots``.
        tapes: forwards that may wait for their backward at one time.
        owed: backwards that may wait for their weight half at one time; 0 where a backward is whole.
        registers: batches of data in use, waiting, or being loaded; 0 where nothing is read.
        holds: stages whose state the worker has at the beginning, where states go from holder to holder.
        channels: those it takes from or gives to.
        body: the lines, in order.
    """

    worker: int
    num_workers: int
    every: int
    over: Window
    tapes: int
    owed: int
    registers: int
    channels: tuple[Channel, ...]
    body: tuple[Instruction, ...]
    holds: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages that the worker runs."""
        return tuple(sorted({instruction.stage for instruction in self.body}))

    @property
    def free(self) -> bool:
        """Whether the order is not the program's, but that in which things become possible."""
        return not self.every

    @property
    def halved(self) -> bool:
        """Whether its backwards run in two halves."""
        return any(instruction.opcode == "backward-weight" for instruction in self.body)

    def __str__(self) -> str:
        lines = [
            f"worker {self.worker} of {self.num_workers}",
            f"loop {f'every {self.every}' if self.every else 'free'} over {self.over}",
        ]
        counts = {"tapes": self.tapes, "owed": self.owed, "registers": self.registers}
        lines += [f"{name} {count}" for name, count in counts.items() if count]
        lines += [f"holds {','.join(map(str, self.holds))}"] if self.holds else []
        lines += map(str, self.channels)
        return "\n".join([*lines, "body", *(f"  {instruction}" for instruction in self.body)]) + "\n"

    @staticmethod
    def parse(text: str) -> Program:
        """The program that prints as ``text``.

        Raises:
            PlanError: naming the first line that no program has there.
        """
        lines = text.splitlines()
        heads: dict[str, tuple[str, ...]] = {"tapes": ("0",), "owed": ("0",), "registers": ("0",), "holds": ("",)}
        channels, body = [], []
        for number, line in enumerate(lines, 1):
            words = line.split()
            try:
                if line.startswith("  "):
                    body.append(_instruction(words))
                elif words[0] == "channel":
                    channels.append(_channel(line))
                else:
                    heads[words[0]] = _matched(_HEADS[words[0]], line)
            except (IndexError, KeyError, PlanError, ValueError) as error:
                raise _bad_line(number, line) from error
        if missing := [name for name in _HEADS if name not in heads]:
            raise _bad_line(len(lines), f"the end, and no line {missing[0]!r}")
        program = Program(
            worker=int(heads["worker"][0]),
            num_workers=int(heads["worker"][1]),
            every=int(heads["loop"][0] or 0),
            over=heads["loop"][1],  # type: ignore[arg-type]
            tapes=int(heads["tapes"][0]),
            owed=int(heads["owed"][0]),
            registers=int(heads["registers"][0]),
            channels=tuple(channels),
            body=tuple(body),
            holds=tuple([int(stage) for stage in heads["holds"][0].split(",") if stage]),
        )
        for number, (line, printed) in enumerate(zip_longest(lines, str(program).splitlines(), fillvalue=""), 1):
            if line != printed:
                raise _bad_line(number, line)
        return program


_HEADS = {
    "worker": re.compile(r"worker (\d+) of (\d+)"),
    "loop": re.compile(r"loop (?:every ([1-9]\d*)|free) over (batch|run|slots)"),
    "tapes": re.compile(r"tapes (\d+)"),
    "owed": re.compile(r"owed (\d+)"),
    "registers": re.compile(r"registers (\d+)"),
    "holds": re.compile(r"holds (\d+(?:,\d+)*)"),
    "body": re.compile("body"),
}
_CHANNEL = re.compile(
    rf"channel (\d+) ({'|'.join(get_args(ChannelKind))}) ([\d.,]+)>([\d.,]+) slots (\d+)"
    r"(?: by (\S+))?(?: within (-?\d+):(-?\d+))?"
)
_PORT = re.compile(r"(\d+)\.(\d+)")
_OFFSET = re.compile(r"g([+-]\d+)?")
_WORDS = {
    "takes": re.compile(r"\d+(,\d+)*"),
    "gives": re.compile(r"\d+(,\d+)*"),
    "reads": re.compile("entry|[fp-]+k?"),
    "weights": re.compile("forward|live|ahead"),
    "distance": re.compile(r"crossed(\+\d+)?|\d+"),
    "mode": re.compile("stash|recompute|mixed"),
    "of": re.compile(r"\S+"),
    "segments": re.compile(r"\d+:\d+"),
}


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match.groups()


def _channel(line: str) -> Channel:
    number, kind, sources, targets, slots, by, *within = _matched(_CHANNEL, line)
    phases = tuple(map(Phase.parse, by.split(","))) if by else ()
    beyond = int(within[0] or 0), int(within[1] or 0)
    return Channel(int(number), kind, _ports(sources), _ports(targets), int(slots), phases, beyond)  # type: ignore[arg-type]


def _ports(text: str) -> tuple[Port, ...]:
    return tuple([Port(*map(int, _matched(_PORT, port))) for port in text.split(",")])


def _instruction(words: list[str]) -> Instruction:
    opcode, stage, place, *rest = words
    if opcode not in OPCODES or len(rest) % 2:
        raise ValueError(words)
    named = dict(zip(rest[::2], rest[1::2], strict=True))
    for word, value in named.items():
        _matched(_WORDS[word], value)
    return Instruction(
        opcode=opcode,  # type: ignore[arg-type]
        stage=int(stage),
        offset=int(_matched(_OFFSET, place)[0] or 0),
        takes=tuple(int(c) for c in named.get("takes", "").split(",") if c),
        gives=tuple(int(c) for c in named.get("gives", "").split(",") if c),
        **{word: named.get(word, "") for word in ("reads", "weights", "distance", "mode", "of", "segments")},
    )


def _bad_line(number: int, line: str) -> PlanError:
    return PlanError(
        f"line {number} of a program",
        got=repr(line),
        expected="a line as `roundelay simulate --programs` prints it",
        remedy="Programs are made from plans; edit the plan instead.",
    )
