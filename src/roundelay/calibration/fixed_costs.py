"""What a run's own steps cost beside what they compute and send, from the traces of trainings of a small model."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
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


def fixed_costs(transport: str, workers: int, threads: int) -> dict[str, float]:
    """Seconds by name, as :class:`roundelay.planner.machine_profile.MachineProfile` has them.

    Trained is with one worker, and with two where there are as many.
    """
    own = Choices(threads=threads, transport=transport, devices="cpu", cuts="equal")
    names = [op.name for op in capture(_job()).graph.ops]
    whole, cut_up = (_events(Choices(workers=1, cuts=cuts).over(own)) for cuts in ("equal", [names]))
    segment_s = (_pass_s(cut_up) - _pass_s(whole)) / (len(names) - 1)
    instruction_s = message_s = _between(whole, giving=False)
    box_s = 0.0
    if workers > 1:
        piped = _events(Choices(workers=2, micro_batches=8, rule="gpipe").over(own))
        split = _events(Choices(workers=1, tensor_parallel=2).over(own))
        message_s = max(message_s, _between(piped, giving=True))
        box_s = _median(split, "box") + _median(split, "unbox")
    return {
        "instruction_s": instruction_s,
        "message_instruction_s": message_s,
        "segment_s": max(0.0, segment_s),
        "box_s": box_s,
    }


def _job() -> Job:
    with torch.random.fork_rng(devices=[]):
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
    return Job(
        model=torch.nn.Sequential(*layers),
        loss=lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch[1]),
        batches=[(torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH))] * UPDATES,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


def _events(choices: Choices) -> Events:
    """What worker 0 has executed in a training, without the first batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        job = _job()
        captured = capture(job)
        plan = plan_with_reasons(job, choices, captured=captured).plan
        trained = Session(job, captured, plan, 0, Length(steps=UPDATES)).run(gathers="nothing")
    return [one for one in trained.events[0] if one.batch >= WARM_UP]


def _median(events: Events, opcode: str) -> float:
    return statistics.median(one.end_s - one.start_s for one in events if one.opcode == opcode)


def _pass_s(events: Events) -> float:
    return _median(events, "forward") + _median(events, "backward")


def _between(events: Events, *, giving: bool) -> float:
    """Seconds from the end of an instruction to the start of the next, which takes no message."""
    return statistics.median(
        later.start_s - one.end_s for one, later in pairwise(events) if bool(one.gives) == giving and not later.takes
    )
