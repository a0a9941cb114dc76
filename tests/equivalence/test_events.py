"""What the simulator says happens is what happens: events, memory, back-pressure, and work at the same time."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planning.planning import plan as make_plan
from roundelay.runtime.handlers import HANDLERS, Context, Handler
from roundelay.runtime.workload import Wrap
from roundelay.session.training import Length, Session, Trained
from roundelay.simulator import Simulation, simulate
from roundelay.transport.endpoint import Delivery, Endpoint, Message
from tests.equivalence.cells import STEPS, VARIANTS, Bench, bench, delays
from tests.zoo import ZOO

ROWS = [6, 6, 3, 6, 3]
PATIENCE_S = 20.0
Handlers = Mapping[int, Mapping[str, Handler]]


def simulated(plan: Plan) -> Simulation:
    """The plan on the virtual clock, with the zoo's batches."""
    counts = [min(plan.micro_batches, rows) for rows in ROWS]
    return simulate(plan, emit(read(plan)), stream(counts))


def recorded(place: Bench, plan: Plan, *, handlers: Handlers | None = None, wrap: Wrap | None = None) -> Trained:
    """The plan, really run."""
    place.restore()
    session = Session(place.job(), place.captured, plan, 0, Length(steps=STEPS))
    return session.run(notify=lambda event: None, handlers=handlers, wrap=wrap)


def fired(trained: Trained) -> tuple[tuple[str, ...], ...]:
    """The text of every event of every worker."""
    return tuple(tuple(event[-1] for event in trained.events[k]) for k in sorted(trained.events))


def with_slots(plan: Plan, slots: int) -> Plan:
    """The plan with as many slots on every edge."""
    return dataclasses.replace(plan, edges=tuple(dataclasses.replace(edge, slots=slots) for edge in plan.edges))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "pipedream", *(n for n in VARIANTS if n.endswith("stash"))])
def test_a_run_fires_what_the_simulator_fires(name: str, stages: int, micro_batches: int) -> None:
    place = bench("skip")
    plan = place.plan(VARIANTS[name], stages, micro_batches)
    expected = simulated(plan).events
    assert fired(recorded(place, plan)) == expected
    assert fired(recorded(place, plan, wrap=delays(1))) == expected


@pytest.mark.parametrize("name", ["gpipe", "pipeoptim released-code mixed"])
def test_a_run_over_gloo_fires_what_the_simulator_fires(name: str) -> None:
    place = bench("two_inputs")
    plan = place.plan(VARIANTS[name], 3, 3, "gloo")
    assert fired(recorded(place, plan, wrap=delays(2))) == simulated(plan).events


def test_the_times_of_a_plan_change_when_but_not_what() -> None:
    place = bench("skip")
    plan = place.plan(VARIANTS["pipedream"], 3, 1)
    stages = tuple(
        dataclasses.replace(s, forward_s=0.1 * 7**k, backward_s=1.0 / 3**k) for k, s in enumerate(plan.stages)
    )
    other = simulated(dataclasses.replace(plan, stages=stages))
    assert other.events == simulated(plan).events
    assert other.makespan_s != simulated(plan).makespan_s


class Ledger:
    """Counts the messages of each channel that are sent and not yet granted."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open: Counter[int] = Counter()
        self.peak: dict[int, int] = defaultdict(int)

    def add(self, channel: int, number: int) -> None:
        """Note a message, or a grant."""
        with self.changed:
            self.open[channel] += number
            self.peak[channel] = max(self.peak[channel], self.open[channel])
            self.changed.notify_all()

    def await_open(self, channel: int, number: int) -> bool:
        """Whether so many messages were open at one time, before patience ended."""
        with self.changed:
            return self.changed.wait_for(lambda: self.peak[channel] >= number, PATIENCE_S)


class Counting(Endpoint):
    """An endpoint that keeps a ledger."""

    def __init__(self, inner: Endpoint, ledger: Ledger) -> None:
        self.worker, self._inner, self._ledger = inner.worker, inner, ledger

    def send(self, to: int, message: Message) -> int:
        """A message is on its way."""
        self._ledger.add(message.channel, 1)
        return self._inner.send(to, message)

    def grant(self, to: int, channel: int) -> None:
        """A message has been used."""
        self._ledger.add(channel, -1)
        self._inner.grant(to, channel)

    def receive(self, timeout_s: float, credits: bool = True) -> Delivery:
        """As it is."""
        return self._inner.receive(timeout_s, credits)

    def close(self) -> None:
        """As it is."""
        self._inner.close()

    def abort(self, reason: str) -> None:
        """As it is."""
        self._inner.abort(reason)

    @property
    def aborted(self) -> bool:
        """As it is."""
        return self._inner.aborted

    @property
    def bytes_sent(self) -> dict[int, int]:
        """As it is."""
        return self._inner.bytes_sent

    @property
    def bytes_received(self) -> dict[int, int]:
        """As it is."""
        return self._inner.bytes_received


def patient(opcode: str, before: Callable[[Context, Run], Any]) -> Handler:
    """A handler that does something else first."""

    def handler(context: Context, run: Run) -> MicroBatch | None:
        before(context, run)
        return HANDLERS[opcode](context, run)

    return handler


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_slow_stage_stops_the_one_before_it_at_its_slots(slots: int) -> None:
    """The last stage does not use its first message before all slots are taken, and then lets its sender try more."""
    place, ledger = bench("mlp"), Ledger()
    plan = with_slots(place.plan(VARIANTS["gpipe"], 3, 4), slots)
    into_last = [c.id for c in emit(read(plan))[2].channels if c.kind == "forward"]
    filled: list[bool] = []

    def wait(context: Context, run: Run) -> None:
        if run.g == 0:
            filled.extend(ledger.await_open(channel, slots) for channel in into_last)
        time.sleep(0.02)

    handlers = {2: {"forward": patient("forward", wait)}}
    trained = recorded(place, plan, handlers=handlers, wrap=lambda endpoint: Counting(endpoint, ledger))
    assert filled
    assert all(filled)
    assert {ledger.peak[channel] for channel in into_last} == {slots}
    assert all(peak <= slots for peak in ledger.peak.values())
    assert not +ledger.open
    assert fired(trained) == simulated(plan).events


def test_slots_are_seen_in_the_trace() -> None:
    place = bench("mlp")
    plans = [with_slots(place.plan(VARIANTS["gpipe"], 2, 4), slots) for slots in (1, 2, 4)]
    traces = [fired(recorded(place, plan)) for plan in plans]
    assert len(set(traces)) == 3
    assert traces == [simulated(plan).events for plan in plans]


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_workers_compute_at_the_same_time(transport: str) -> None:
    place = bench("mlp")
    plan = place.plan(VARIANTS["pipedream"], 2, 3, transport)
    slow = {opcode: patient(opcode, lambda context, run: time.sleep(0.02)) for opcode in ("forward", "backward")}
    trained = recorded(place, plan, handlers={0: slow, 1: slow})
    spans = [[(e[5], e[6]) for e in trained.events[k] if e[0] in slow] for k in (0, 1)]
    together = sum(max(a, c) < min(b, d) for a, b in spans[0] for c, d in spans[1])
    assert together > 0


@pytest.mark.parametrize("mode", ["stash", "recompute", "mixed"])
@pytest.mark.parametrize("model", ZOO)
def test_tapes_hold_the_bytes_that_were_planned(model: str, mode: str) -> None:
    place = bench(model)
    plan = make_plan(
        place.job(), workers=3, rule="pipeoptim", micro_batches=2, backward=mode, captured=place.captured, deadline_s=60
    )
    peaks: dict[int, int] = defaultdict(int)

    def forward(context: Context, run: Run) -> MicroBatch | None:
        header = HANDLERS["forward"](context, run)
        peaks[context.worker] = max(peaks[context.worker], len(context.stage.tapes))
        return header

    trained = recorded(place, plan, handlers={k: {"forward": forward} for k in range(3)})
    reports = simulated(plan).workers
    planned = [stage.tape_bytes for stage in plan.stages]
    assert [trained.workers[k]["tape_bytes"][str(k)] for k in range(3)] == planned
    assert [report.tape_bytes_peak / report.tapes_peak for report in reports] == planned
    assert [peaks[k] for k in range(3)] == [report.tapes_peak for report in reports] == [3, 2, 1]
    assert all(size > 0 for size in planned)
