"""What all workers measure, step by step, in the same order; and the channels that they do it on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from roundelay.errors import UsageError
from roundelay.ir.clip import Clip
from roundelay.ir.exchange import (
    WEIGHT_GRADIENT,
    ExchangePlan,
    Phase,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.program import Channel, ChannelKind, Port, Program
from roundelay.ir.transports import TRANSPORTS, transport_named
from roundelay.ir.work import Settings, Work
from roundelay.planner.machine_profile import SHARED

What = Literal["message", "exchange", "operator", "alone", "together", "copy"]

PHASES: Mapping[str, tuple[Phase, ...]] = {
    "all-reduce": all_reduce(),
    "all-gather": all_gather(),
    "reduce-scatter": reduce_scatter(),
    "all-to-all": all_to_all(0, 1),
    SHARED: all_reduce(),
}
"""By kind, how holders exchange."""

_ROWS = 8
"""The first dimension of what is exchanged has a multiple of this size."""

_ELEMENT = 4
"""Bytes of an element."""

DEADLINE_S = 120.0
"""Seconds that a worker may take for one step."""

SECONDS = 20.0
"""Seconds after which no further sweep over all steps begins, if nothing else is said."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Args:
        seconds: after which no further sweep over all steps begins.
        sweeps: the fewest sweeps, the first of which warms up.
        num_bytes: of messages, exchanges and what operators read and write.
        width: the largest width of a matrix product.
        burst_s: seconds for which workers compute at once.
    """

    seconds: float
    sweeps: int = 4
    num_bytes: tuple[int, ...] = (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    width: int = 1024
    burst_s: float = 0.03


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure.

    Args:
        what: a message there and back, an exchange, an operator, a class of operators on one worker alone or on all
            together, or a copy.
        kind: which exchange or class of operators.
        size: bytes, or the number of the operator.
        group: workers that take part, from 0 on; of a message the last of them, and worker 0.
    """

    what: What
    kind: str = ""
    size: int = 0
    group: int = 1


@dataclass(frozen=True)
class Sweep:
    """The steps of one sweep, which all workers make in turn.

    Args:
        workers: how many there are.
        transport: how their messages travel.
        threads: intra-op threads of each.
        effort: how much to measure.
        operators: how many operators there are.
        classes: of operators, to be measured together.
    """

    workers: int
    transport: str
    threads: int
    effort: Effort
    operators: int
    classes: tuple[str, ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """In order."""
        return (
            *self._links(),
            *(Step("operator", size=number) for number in range(self.operators)),
            *(Step("copy", size=size) for size in self.effort.num_bytes),
            *(Step(*pair) for kind in self.classes for pair in (("alone", kind), ("together", kind))),
        )

    def _links(self) -> Iterator[Step]:
        if self.workers == 1:
            return
        powers = [2**power for power in range(1, self.workers.bit_length())]
        groups = sorted({*powers, self.workers})
        for size in self.effort.num_bytes:
            yield Step("message", size=size, group=self.workers)
            for kind in PHASES:
                if kind != SHARED or self.transport == "shm":
                    yield from (Step("exchange", kind, size, group) for group in groups)

    @property
    def in_step(self) -> int:
        """The channel of the exchange by which all begin a step together."""
        return len(self.steps)

    def works(self) -> tuple[Work, ...]:
        """What each worker is sent: channels, and no instruction."""
        settings = Settings(
            transport=self.transport,
            deadline_s=DEADLINE_S,
            devices=("cpu",) * self.workers,
            replicas=self.workers,
            shards=0,
            micro_batches=1,
            predictor="none",
            clip=Clip.parse("none"),
            loss_scale=LossScale.parse("none"),
            ema=0.0,
            needs_norm=False,
            awaits_norm=False,
        )
        return tuple([self._work(worker, settings) for worker in range(self.workers)])

    def _work(self, worker: int, settings: Settings) -> Work:
        own = tuple([c for c in self._channels() if c.filled_by(worker) or c.read_by(worker)])
        program = Program(worker, self.workers, 1, "run", 0, 0, 0, own, ())
        planned = {c.id: _planned(self.steps[c.id]) for c in own if c.phases and c.id != self.in_step}
        return Work(program=program, threads=self.threads, settings=settings, stages=(), exchanges=planned)

    def _channels(self) -> Iterator[Channel]:
        everyone = tuple([Port(worker, 0) for worker in range(self.workers)])
        for number, step in enumerate(self.steps):
            if step.what == "exchange":
                kind: ChannelKind = "weight-gradient" if step.kind == SHARED else "boxed"
                group = everyone[: step.group]
                yield Channel(number, kind, group, group, 1, PHASES[step.kind])
            elif step.what == "message":
                there, back = everyone[:1], everyone[-1:]
                yield Channel(number, "forward", there, back, 1)
                yield Channel(self.back(number), "gradient", back, there, 1)
        yield Channel(self.in_step, "boxed", everyone, everyone, 1, all_reduce(op="max"))

    def back(self, number: int) -> int:
        """The channel on which the messages of a step come back."""
        return len(self.steps) + 1 + number


def shape_of(step: Step) -> tuple[int, ...]:
    """The shape of the whole tensor that a step exchanges: flat, or rows of which each worker has some."""
    rows = _ROWS * math.ceil(step.group / _ROWS)
    count = max(step.size // _ELEMENT, rows)
    return (count,) if len(PHASES[step.kind]) > 1 else (rows, count // rows)


def _planned(step: Step) -> ExchangePlan:
    return ExchangePlan(
        stage=0,
        kind=WEIGHT_GRADIENT if step.kind == SHARED else "boxed",
        axis="replicas",
        value="",
        segment=0,
        phases=PHASES[step.kind],
        dtypes=("float32",),
        shapes=(shape_of(step),),
        unused=(),
    )


def check_measurable(transport: str) -> None:
    """Refuse a transport between devices: the workers that measure compute on the CPU.

    Raises:
        UsageError: it is one.
        PlanError: there is no such transport.
    """
    if "cpu" not in transport_named(transport).devices:
        known = ", ".join(name for name, one in TRANSPORTS.items() if "cpu" in one.devices)
        raise UsageError(
            "the transport to measure",
            got=transport,
            expected=f"one of {known}, between workers on the CPU",
            remedy="Choose one of these.",
        )
