"""Runs whose order is free, each replayed from its letters: ``python -m tests.equivalence.free_runs --runs 30``.

Each is of a model, a number of stages, an optimizer, a transport and delays by lot: every message is held back, and
every forward and backward sleeps, for up to a few milliseconds. It is run twice with the same seed. Counted is in how
many the order differs from that of ``pipedream``, and from that of the second run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.observe.action_trace import ActionTrace
from roundelay.proof.reference_start import Note, ReferenceStart
from roundelay.proof.replayed import replayed_run, told
from roundelay.runtime.handlers import Context, Handler, do_backward, do_forward
from roundelay.schedules import actions, schedule_named
from roundelay.session.run_record import Trained
from roundelay.session.training import Length, Session
from tests.equivalence.cells import OPTIMIZERS, Bench, Variant, bench, delays

FREE = Variant("ravnest", "none", "stash")
MODELS = ("skip", "two_inputs", "tied_head", "batchnorm", "gpt2", "token_mean", "dropout_heavy", "t5")
"""Chains, skips over stages, branches that join, and weights that two stages read."""

STEPS = 24
SLEEP_S = 0.003


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of one run.

    Args:
        what: it was.
        letters: replayed.
        digests: of everything computed, compared.
        difference: the first; empty if there is none.
        as_pipedream: whether the order is that of ``pipedream``.
        repeated: whether a second run has the same order.
        stale: by stage, most updates between a forward and its own backward.
        bound: by stage, most that the plan allows.
    """

    what: str
    letters: int
    digests: int
    difference: str
    as_pipedream: bool
    repeated: bool
    stale: tuple[int, ...]
    bound: tuple[int, ...]


def free_run(seed: int) -> Outcome:
    """One run, and a second one for its order."""
    random = Random(seed)
    model, stages = random.choice(MODELS), random.choice([3, 4])
    optimizer, transport = random.choice([*OPTIMIZERS]), random.choice(["shm", "memory", "gloo"])
    place = bench(model)
    plan = place.plan(FREE, stages, 1, transport)
    first, difference, digests = _run(place, plan, optimizer, seed, compare=True)
    second, _, _ = _run(place, plan, optimizer, seed)
    ours, again = letters(first.actions), letters(second.actions)
    return Outcome(
        f"{model}, {stages} stages, {optimizer}, {transport}",
        sum(map(len, ours)),
        digests,
        difference,
        ours == by_schedule(plan),
        ours == again,
        tuple(staleness(own) for own in ours),
        tuple(stage.in_flight - 1 for stage in plan.stages),
    )


def _run(place: Bench, plan: Plan, optimizer: str, seed: int, *, compare: bool = False) -> tuple[Trained, str, int]:
    place.restore()
    session = Session(place.job(OPTIMIZERS[optimizer]), place.captured, plan, seed, Length(steps=STEPS))
    origin, notes = ReferenceStart.of(session.captured), list[Note]()
    lots = time.perf_counter_ns() % 1000  # other delays every time
    handlers = {stage: sleeping(stage, lots) for stage in range(plan.num_stages)}
    trained = session.run(audit=True, handlers=handlers, wrap=delays(lots))
    if not compare:
        return trained, "", 0
    found = replayed_run(session, origin, trained, notes)
    odd = [key for key, expected in notes if trained.digests.get(key) != expected]
    missing = set(trained.digests) ^ {key for key, _ in notes}
    difference = told(found) or f"{odd[0]} differs" if odd else f"{min(missing)} is missing" if missing else told(found)
    return trained, difference, len(notes)


def sleeping(stage: int, lots: int) -> Mapping[str, Handler]:
    """Handlers that sleep by lot before they compute."""

    def after(handler: Handler, context: Context, run: Run) -> MicroBatch | None:
        time.sleep(Random(f"{lots} {stage} {run.instruction.opcode} {run.g}").random() * SLEEP_S)
        return handler(context, run)

    return {"forward": partial(after, do_forward), "backward": partial(after, do_backward)}


def letters(actions_of: Mapping[int, ActionTrace]) -> list[str]:
    """The letters of each stage."""
    return [actions_of[stage].letters for stage in sorted(actions_of)]


def by_schedule(plan: Plan) -> list[str]:
    """The letters of each stage in the order of ``pipedream``."""
    schedule = schedule_named("async-1f1b")
    return [
        "".join(a.kind for a in actions(schedule, [k], plan.num_stages, [1] * STEPS) if a.kind in "FB")
        for k in range(plan.num_stages)
    ]


def staleness(own: str) -> int:
    """Most updates between a forward and its own backward, by a stage's letters."""
    begun: list[int] = []
    most = updates = 0
    for letter in own:
        if letter == "F":
            begun.append(updates)
        else:
            most = max(most, updates - begun.pop(0))
            updates += 1
    return most


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the runs; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.free_runs", description="Replay free runs.")
    parser.add_argument("--runs", type=int, default=30, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    options = parser.parse_args(arguments)
    outcomes = []
    for seed in range(options.seed, options.seed + options.runs):
        found = free_run(seed)
        outcomes.append(found)
        order = f"pipedream's order: {found.as_pipedream}, the same again: {found.repeated}"
        print(f"{seed}: {found.what}: {found.difference or 'bit-equal'}; {order}; stale {found.stale} of {found.bound}")
    other = sum(not found.as_pipedream and not found.repeated for found in outcomes)
    differing = sum(bool(found.difference) for found in outcomes)
    total, digests = sum(found.letters for found in outcomes), sum(found.digests for found in outcomes)
    print(f"{total:,} letters, {digests:,} digests; {differing} of {len(outcomes)} runs differ from their replay")
    print(f"{other} of {len(outcomes)} have another order than pipedream and than a second run")
    bounded = all(s <= b and own.stale[-1] == 0 for own in outcomes for s, b in zip(own.stale, own.bound, strict=True))
    return 0 if bounded and not differing and other >= len(outcomes) * 25 / 30 else 1


if __name__ == "__main__":
    sys.exit(main())
