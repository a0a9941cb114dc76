"""Where a simulated run's time goes: terms of the chain that decides it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.trace import Span
from roundelay.simulator import simulate
from roundelay.simulator.critical_path import (
    COMPUTE,
    MESSAGES,
    OTHER,
    SUMS,
    UPDATE,
    Piece,
    batch_terms,
    critical_path,
    terms,
)
from tests.lower.plans import FEW, plan_of, plans, replicated

BATCHES = 3


def path_of(plan: Plan) -> tuple[float, tuple[Piece, ...]]:
    programs = emit(read(plan))
    simulation = simulate(plan, programs, stream([plan.micro_batches] * BATCHES))
    return simulation.makespan_s, critical_path(simulation.spans(), programs)


@FEW
@given(plans())
def test_the_chain_runs_from_start_to_end_without_a_gap(plan: Plan) -> None:
    makespan_s, path = path_of(plan)
    assert path[0].start_s == 0.0
    assert path[-1].end_s == makespan_s
    assert all(one.end_s == pytest.approx(other.start_s, abs=1e-12) for one, other in pairwise(path))
    assert sum(terms(path).values()) == pytest.approx(makespan_s)


@FEW
@given(plans(rules=("gpipe", "1f1b")))
def test_what_is_on_the_chain_decides_and_what_is_not_does_not(plan: Plan) -> None:
    """A stage's forward on the chain, if it takes longer, makes the run longer by as much at least."""
    makespan_s, path = path_of(plan)
    stage = next(piece.stage for piece in path if piece.term == COMPUTE)
    times = sum(1 for piece in path if piece.term == COMPUTE and piece.stage == stage)
    longer = [
        replace(one, forward_s=one.forward_s + 0.01, backward_s=one.backward_s + 0.01) if k == stage else one
        for k, one in enumerate(plan.stages)
    ]
    after_s, _ = path_of(replace(plan, stages=tuple(longer)))
    assert after_s >= makespan_s + 0.01 * times - 1e-9


def test_terms_have_their_names() -> None:
    """A stage takes 1 s and 2 s, a message 5 s, a phase of a sum of 48 bytes 28 s and 5; a replica is sent its data."""
    one = plan_of("1f1b", 2, 1, latency_s=5.0)
    makespan_s, path = path_of(one)
    assert terms(path) == {MESSAGES: BATCHES * 2 * 5.0, COMPUTE: BATCHES * 2 * 3.0}
    assert makespan_s == BATCHES * 16.0
    of_stage = {k: sum(p.end_s - p.start_s for p in path if (p.term, p.stage) == (COMPUTE, k)) for k in (0, 1)}
    assert of_stage == {0: BATCHES * 3.0, 1: BATCHES * 3.0}
    found = terms(path_of(replicated(one, 2))[1])
    assert found == {SUMS: BATCHES * 2 * 33.0, MESSAGES: BATCHES * 3 * 5.0, COMPUTE: BATCHES * 2 * 3.0}


def test_what_holders_compute_for_an_exchange_belongs_to_it() -> None:
    two = replicated(plan_of("1f1b", 1, 1), 2)
    known = tuple([replace(one, seconds=3.0, busy_s=2.0) for one in two.exchanges])
    assert terms(path_of(replace(two, exchanges=known))[1]) == {SUMS: BATCHES * 5.0, COMPUTE: BATCHES * 3.0}


def span(opcode: str, g: int, start: float, end: float, worker: int = 0, **channels: tuple[int, ...]) -> Span:
    return Span(worker, opcode, g, g, 0, 0, start, end, 0, stage=worker, **channels)


def test_of_a_real_run_a_message_on_its_way_costs_what_the_worker_waits_for_it() -> None:
    """Worker 1 sends at 1 s; worker 0 computes until 3 s, and begins what reads the message at 3.5 s."""
    programs = emit(read(plan_of("1f1b", 2, 1)))
    down = next(c.id for program in programs for c in program.channels if c.kind == "gradient")
    spans = [
        span("backward", 0, 0.0, 1.0, worker=1, gives=(down,)),
        span("forward", 1, 0.0, 3.0),
        span("backward", 0, 3.5, 5.0, takes=(down,)),
        span("update", 0, 5.00005, 6.0),
    ]
    found = terms(critical_path(spans, programs, real=True))
    assert found == pytest.approx({COMPUTE: 4.5, UPDATE: 0.99995, MESSAGES: 0.5, OTHER: 5e-5})
    assert terms(critical_path(spans, programs)) == pytest.approx(
        {MESSAGES: 2.5, COMPUTE: 2.5, UPDATE: 0.99995, OTHER: 5e-5}
    )


def test_terms_of_a_batch_leave_out_the_first_batches() -> None:
    programs = emit(read(plan_of("1f1b", 1, 1)))
    spans = [span("forward", g, g * 10.0, g * 10.0 + (9.0 if g < 3 else 2.0)) for g in range(9)]
    assert batch_terms(spans, programs) == pytest.approx({COMPUTE: 2.0, OTHER: (82.0 - 29.0) / 6 - 2.0})
    assert batch_terms(spans[:5], programs)[COMPUTE] == pytest.approx((3 * 9.0 + 2 * 2.0) / 5)


def test_pieces_of_a_real_run_do_not_overlap() -> None:
    """Another worker's clock, or a span that ends while what it made is read."""
    programs = emit(read(plan_of("1f1b", 2, 1)))
    down = next(c.id for program in programs for c in program.channels if c.kind == "gradient")
    spans = [
        span("backward", 0, 0.0, 1.0, worker=1, gives=(down,)),
        span("backward", 0, 0.99995, 2.0, takes=(down,)),
    ]
    path = critical_path(spans, programs, real=True)
    assert sum(terms(path).values()) == pytest.approx(2.0, abs=1e-9)
