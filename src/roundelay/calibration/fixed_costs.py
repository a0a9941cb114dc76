"""What a run's own steps cost beside what they compute and send, from the traces of trainings of a small model."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roundelay.errors import PlanWarning
from roundelay.job import Job
from roundelay.planner.plan_options import Choices
from roundelay.planning.planning import capture, plan_with_reasons
from roundelay.session.run_record import ExecutedInstruction
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

WIDTH, LAYERS, ROWS = 8, 12, 16
UPDATES, WARM_UP = 40, 10

Events = Sequence[ExecutedInstruction]


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """See :class:`roundelay.planner.machine_profile.MachineProfile`.

    Args:
        instruction_s: seconds between instructions.
        message_instruction_s: the same after one that gives a message.
        segment_s: seconds of a segment.
        box_s: seconds of a box and its unbox.
    """

    instruction_s: float
    message_instruction_s: float
    segment_s: float
    box_s: float


def fixed_costs(transport: str, workers: int, threads: int) -> FixedCosts:
    """Measure them with one worker, and with two where there are as many."""
    own = Choices(workers=1, threads=threads, transport=transport, devices="cpu")
    whole = _events(own)[0]
    names = [op.name for op in capture(_job()).graph.ops]
    in_segments = _events(own.over(Choices(cuts=[names])))[0]
    segment_s = (_pass_s(in_segments) - _pass_s(whole)) / (len(names) - 1)
    instruction_s = _between(whole, giving=False)
    if workers == 1:
        return FixedCosts(instruction_s, instruction_s, max(0.0, segment_s), 0.0)
    piped = _events(Choices(workers=2, micro_batches=8, rule="gpipe", cuts="equal").over(own))[0]
    split = _events(Choices(tensor_parallel=2).over(own))[0]
    return FixedCosts(
        instruction_s,
        max(instruction_s, _between(piped, giving=True)),
        max(0.0, segment_s),
        _median(split, ["box"]) + _median(split, ["unbox"]),
    )


def _job() -> Job:
    with torch.random.fork_rng(devices=[]):
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
    batches = [(torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH))] * UPDATES
    return Job(
        model=torch.nn.Sequential(*layers),
        loss=lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch[1]),
        batches=batches,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


def _events(choices: Choices) -> dict[int, Events]:
    """What each worker has executed in a training, without the first batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        job = _job()
        captured = capture(job)
        plan = plan_with_reasons(job, choices, captured=captured).plan
        trained = Session(job, captured, plan, 0, Length(steps=UPDATES)).run(gathers="nothing")
    return {worker: [one for one in events if one.batch >= WARM_UP] for worker, events in trained.events.items()}


def _median(events: Events, opcodes: Iterable[str]) -> float:
    return statistics.median(one.end_s - one.start_s for one in events if one.opcode in opcodes)


def _pass_s(events: Events) -> float:
    """Seconds of a forward and a backward."""
    return _median(events, ["forward"]) + _median(events, ["backward"])


def _between(events: Events, *, giving: bool) -> float:
    """Seconds from the end of an instruction to the start of the next, which takes no message."""
    return statistics.median(
        later.start_s - one.end_s for one, later in pairwise(events) if bool(one.gives) == giving and not later.takes
    )
