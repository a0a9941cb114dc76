"""A plan of three stages that sleep: what a stage takes is 20 ms for each micro-batch, whatever the processor does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import roundelay
from benchmarks.peers.forked import replaced
from roundelay import Job
from roundelay.actor.machine import Run
from roundelay.frontend import Captured
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.planner.free_order import with_capacities
from roundelay.runtime.handlers import HANDLERS, Context, Handler, do_backward, do_forward
from roundelay.session.training import Length, Session
from roundelay.transport import Connecting

MBIT_PER_S, RTT_MS = 100, 40
BYTES_PER_S = 0.965 * MBIT_PER_S * 1e6 / 8
"""What TCP has of the line."""

STAGES, FORWARD_S, BACKWARD_S, UPDATE_S = 3, 0.008, 0.011, 0.001
COMPUTE_LIMIT = 1 / (FORWARD_S + BACKWARD_S + UPDATE_S)
"""Updates per second of a stage that never waits."""

WIDTH = 64


class Scaled(nn.Module):
    """Weights that cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the columns."""
        return x * self.weight


def job_of(message_bytes: int) -> Job:
    """A job whose stages exchange messages of so many bytes."""
    rows = message_bytes // (4 * WIDTH)
    batch = torch.randn(rows, WIDTH), torch.ones(rows, 1)

    def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.mean((outputs - batch[1]) ** 2)

    return Job(
        model=nn.Sequential(*[Scaled() for _ in range(STAGES)]),
        loss=loss,
        batches=lambda epoch: [batch] * 10_000,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


def plan_of(job: Job, captured: Captured, transport: str) -> Plan:
    """A plan with the capacities that the rule gives for stages that sleep, on the bed's links."""
    made = roundelay.plan(
        job, workers=STAGES, rule="ravnest", transport=transport, captured=captured, cuts="equal", threads=1
    )
    link = {"latency_s": RTT_MS / 2e3, "bytes_per_s": BYTES_PER_S}
    edges = [replace(edge, **link) for edge in made.edges]
    return with_capacities(replace(timed(made), edges=tuple(edges)))


def timed(plan: Plan) -> Plan:
    """The plan with the seconds that its stages sleep."""
    stages = [replace(stage, forward_s=FORWARD_S, backward_s=BACKWARD_S, update_s=UPDATE_S) for stage in plan.stages]
    return replace(plan, stages=tuple(stages))


def with_capacity(plan: Plan, slots: int) -> Plan:
    """The plan with so many slots on each edge; each stage may have as many forwards in flight as fill those behind."""
    last = plan.num_stages - 1
    return replace(
        plan,
        edges=tuple([replace(e, slots=slots * (e.target - e.source)) for e in plan.edges]),
        stages=tuple([replace(s, in_flight=1 + slots * (last - k)) for k, s in enumerate(plan.stages)]),
    )


def updates_per_s(job: Job, captured: Captured, plan: Plan, connecting: Connecting, warm: int, updates: int) -> float:
    """Updates per second of the last stage, behind those with which all begins."""
    handlers = {stage: asleep() for stage in range(plan.num_stages)}
    with replaced(plan.transport, connecting):
        session = Session(job, captured, plan, 0, Length(steps=warm + updates))
        done = session.run(notify=lambda event: None, handlers=handlers, gathers="nothing")
    last = plan.num_stages - 1
    ends = [e.end_s for own in done.events.values() for e in own if (e.opcode, e.stage) == ("update", last)]
    return (len(ends) - 1 - warm) / (ends[-1] - ends[warm])


def asleep() -> Mapping[str, Handler]:
    """A stage's handlers that compute, and then sleep for the rest of its seconds."""

    def within(seconds: float, handler: Handler, context: Context, run: Run) -> MicroBatch | None:
        end = time.perf_counter() + seconds
        header = handler(context, run)
        time.sleep(max(0.0, end - time.perf_counter()))
        return header

    return {
        "forward": partial(within, FORWARD_S, do_forward),
        "backward": partial(within, BACKWARD_S, do_backward),
        "update": partial(within, UPDATE_S, HANDLERS["update"]),
    }
