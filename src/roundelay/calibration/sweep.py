"""What all workers measure, step by step, in the same order; and the channels that they do it on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from roundelay.calibration import SECONDS
from roundelay.calibration.operators import CALL, Operator, operators
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
from roundelay.ir.program import Channel, Port, Program
from roundelay.ir.work import Settings, Work
from roundelay.planner.machine_profile import MESSAGE, SHARED

PHASES: Mapping[str, tuple[Phase, ...]] = {
    "all-reduce": all_reduce(),
    "all-gather": all_gather(),
    "reduce-scatter": reduce_scatter(),
    "all-to-all": all_to_all(0, 1),
    SHARED: all_reduce(),
}
"""By kind, how holders exchange."""

BURSTS = {"matmul": ("matmul", 1 << 28), "elementwise": ("elementwise", 1 << 24), "small": (CALL, 64)}
"""What workers compute at once: a class of operators, and its largest size."""

DEADLINE_S = 120.0
"""Seconds that a worker may take for one step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure.

    Args:
        what: a message there and back, or an exchange; an operator; one on worker 0 alone, or on all at once.
        kind: of link, of operator, or of what is computed at once.
        size: bytes, or in the operator's unit.
        group: workers that take part in a link: the first ones; of messages worker 0 and the last.
        operator: what is computed.
    """

    what: Literal["link", "operator", "alone", "together"]
    kind: str
    size: int
    group: int = 1
    operator: Operator | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor that is exchanged: flat, or rows of which each worker has as many."""
        rows = 8 * math.ceil(self.group / 8)
        return (self.size // 4,) if len(PHASES[self.kind]) > 1 else (rows, max(1, self.size // 4 // rows))


@dataclass(frozen=True)
class Sweep:
    """One pass through all steps, which all workers make together.

    Args:
        workers: how many there are.
        transport: how their messages travel.
        threads: intra-op threads of each.
        seconds: after which no further sweep begins.
        least: the fewest sweeps, the first of which warms up.
        num_bytes: of messages, exchanges, and what operators read and write.
        width: the largest of a matrix.
        burst_s: seconds for which workers compute at once.
    """

    workers: int
    transport: str
    threads: int
    seconds: float = SECONDS
    least: int = 4
    num_bytes: tuple[int, ...] = (256, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    width: int = 1024
    burst_s: float = 0.05

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """In order."""
        own = operators(self.num_bytes, self.width)
        steps = [*self._links(), *(Step("operator", one.kind, one.size, operator=one) for one in own)]
        for name, (kind, most) in BURSTS.items():
            one = max((one for one in own if one.kind == kind and one.size <= most), key=lambda one: one.size)
            steps += [Step("alone", name, one.size, operator=one), Step("together", name, one.size, operator=one)]
        return tuple(steps)

    def _links(self) -> Iterator[Step]:
        groups = sorted({*(2**power for power in range(1, self.workers.bit_length())), self.workers} - {1})
        for size in self.num_bytes if groups else ():
            yield Step("link", MESSAGE, size, 2)
            for kind in PHASES:
                if kind != SHARED or self.transport == "shm":
                    yield from (Step("link", kind, size, group) for group in groups)

    def members(self, step: Step) -> tuple[int, ...]:
        """The workers that take part in a step."""
        if step.what == "link":
            return (0, self.workers - 1) if step.kind == MESSAGE else tuple(range(step.group))
        return tuple(range(self.workers)) if step.what == "together" else (0,)

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
        planned = {c.id: _planned(self.steps[c.id]) for c in own if c.phases and c.id < len(self.steps)}
        program = Program(worker, self.workers, 1, "run", 0, 0, 0, own, ())
        return Work(program=program, threads=self.threads, settings=settings, stages=(), exchanges=planned)

    def _channels(self) -> Iterator[Channel]:
        """A channel with each step's number; after these one by which all wait for each other, and those back."""
        for number, step in enumerate(self.steps):
            ports = tuple([Port(worker, 0) for worker in self.members(step)])
            if step.kind == MESSAGE:
                yield Channel(number, "forward", ports[:1], ports[1:], 1)
                yield Channel(self.back(number), "gradient", ports[1:], ports[:1], 1)
            elif step.what == "link":
                yield Channel(number, "boxed", ports, ports, 1, PHASES[step.kind])
        everyone = tuple([Port(worker, 0) for worker in range(self.workers)])
        yield Channel(len(self.steps), "boxed", everyone, everyone, 1, all_reduce(op="max"))

    def back(self, number: int) -> int:
        """The channel on which a step's messages come back."""
        return len(self.steps) + 1 + number


def _planned(step: Step) -> ExchangePlan:
    return ExchangePlan(
        stage=0,
        kind=WEIGHT_GRADIENT if step.kind == SHARED else "boxed",
        axis="replicas",
        value="",
        segment=0,
        phases=PHASES[step.kind],
        dtypes=("float32",),
        shapes=(step.shape,),
        unused=(),
    )
