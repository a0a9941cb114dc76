"""A worker's time is split into computing, data, bubble and wait, and nothing is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.ir.exchange import all_reduce
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import EdgePlan, Plan
from roundelay.ir.program import Channel, Port
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.time_shares import Shares, gaps_of, shares_of
from roundelay.observe.trace import Gap, Span
from roundelay.simulator import simulate
from tests.lower.plans import FEW, counts_for, edge_of, plan_of, plans
from tests.observe.spans import span

JOBS = plans().flatmap(lambda plan: st.tuples(st.just(plan), counts_for(plan)))


def between(*edges: EdgePlan) -> tuple[Channel, ...]:
    """The channels of edges between stages that are each on a worker of their own."""
    channels: list[Channel] = []
    for edge in edges:
        ends = (Port(edge.source, edge.source),), (Port(edge.target, edge.target),)
        channels.append(Channel(len(channels), "forward", *ends, edge.slots))
        channels.append(Channel(len(channels), "gradient", *ends[::-1], edge.slots))
    return tuple(channels)


CHAIN = between(edge_of(0, 1, slots=2))


def through(spans: list[Span], channels: Sequence[Channel]) -> list[Span]:
    """The spans with the channels of activations and gradients that they use."""
    kinds = {"forward": "forward", "backward": "gradient"}

    def used(s: Span, *, gives: bool) -> tuple[int, ...]:
        mine = [c for c in channels if c.kind == kinds.get(s.opcode)]
        return tuple(c.id for c in mine if Port(s.worker, s.stage) in (c.sources if gives else c.targets))

    return [replace(s, gives=used(s, gives=True), takes=used(s, gives=False)) for s in spans]


def shares(spans: list[Span], channels: Sequence[Channel], num_workers: int) -> list[Shares]:
    """Shares with the gaps that these channels make."""
    return shares_of(spans, gaps_of(spans, channels, num_workers), num_workers)


def simulated(plan: Plan, counts: list[int]) -> list[Span]:
    """A simulated run as spans."""
    return simulate(plan, emit(read(plan)), stream(counts)).spans()


#: Two stages, one micro-batch: each message takes a second, and worker 0 dawdles half a second before its update.
BY_HAND = through(
    [
        span(0, "read", 0, 10.0, 11.0),
        span(0, "forward", 0, 11.0, 12.0),
        span(1, "forward", 0, 13.0, 14.0),
        span(1, "backward", 0, 14.0, 16.0),
        span(1, "update", 0, 16.0, 17.0),
        span(0, "backward", 0, 17.0, 19.0),
        span(0, "update", 0, 19.5, 20.0),
    ],
    CHAIN,
)


def test_a_gap_is_bubble_until_the_neighbour_has_ended_and_wait_from_then_on() -> None:
    assert gaps_of(BY_HAND, CHAIN, 2) == [
        Gap(0, "bubble", 12.0, 16.0),
        Gap(0, "wait", 16.0, 17.0),
        Gap(0, "wait", 19.0, 19.5),
        Gap(1, "bubble", 10.0, 12.0),
        Gap(1, "wait", 12.0, 13.0),
        Gap(1, "bubble", 17.0, 20.0),
    ]


def test_shares_are_of_the_whole_run_s_time() -> None:
    first, second = shares(BY_HAND, CHAIN, 2)
    told = {"busy": 0.35, "forward": 0.1, "backward": 0.2, "update": 0.05, "data": 0.1, "bubble": 0.4, "wait": 0.15}
    assert first.as_json() == pytest.approx(told)
    assert (second.busy, second.data, second.bubble, second.wait) == pytest.approx((0.4, 0.0, 0.5, 0.1))


def test_a_slot_that_is_not_free_is_bubble_until_its_message_has_been_read() -> None:
    """One slot: the second forward is possible when the neighbour has read the first."""
    spans = [span(0, "forward", 0, 0, 1), span(0, "forward", 1, 5, 6), span(1, "forward", 0, 2, 4)]
    one, two = between(edge_of(0, 1, slots=1)), between(edge_of(0, 1, slots=2))
    assert gaps_of(through(spans, one), one, 2)[:2] == [Gap(0, "bubble", 1, 4), Gap(0, "wait", 4, 5)]
    assert gaps_of(through(spans, two), two, 2)[:1] == [Gap(0, "wait", 1, 5)]


def test_of_several_neighbours_the_last_one_counts() -> None:
    spans = [span(0, "forward", 0, 0, 1), span(1, "forward", 0, 1, 3), span(2, "forward", 0, 4, 5)]
    edges = between(edge_of(0, 1), edge_of(0, 2), edge_of(1, 2))
    assert [gap for gap in gaps_of(through(spans, edges), edges, 3) if gap.worker == 2] == [
        Gap(2, "bubble", 0, 3),
        Gap(2, "wait", 3, 4),
    ]


@pytest.mark.parametrize("offset", [-30.0, 30.0])
def test_workers_whose_clocks_differ_are_idle_for_reasons_that_nobody_can_tell(offset: float) -> None:
    moved = [replace(s, start_s=s.start_s + offset * s.worker, end_s=s.end_s + offset * s.worker) for s in BY_HAND]
    for share in shares(moved, CHAIN, 2):
        assert (share.wait, share.bubble) == (None, None)
        assert share.busy + share.data + share.idle == pytest.approx(1.0)


def test_nothing_that_ran_has_no_shares() -> None:
    (share,) = shares([], (), 1)
    assert (share.busy, share.data, share.idle) == (0.0, 0.0, 0.0)


@FEW
@given(JOBS)
def test_with_messages_that_take_no_time_all_that_is_idle_is_bubble(job: tuple[Plan, list[int]]) -> None:
    plan, counts = job
    simulation = simulate(plan, emit(read(plan)), stream(counts))
    found = shares(simulated(plan, counts), channels_of(read(plan)), plan.num_stages)
    assert [share.wait for share in found] == pytest.approx([0.0] * len(found), abs=1e-9)
    assert sum(share.bubble or 0.0 for share in found) / len(found) == pytest.approx(simulation.bubble, abs=1e-9)


@FEW
@given(JOBS, st.floats(0.0, 1.0))
def test_the_six_add_up_to_one_whatever_messages_take(job: tuple[Plan, list[int]], latency_s: float) -> None:
    plan, counts = job
    slow = replace(plan, latency_s=latency_s)
    for share in shares(simulated(slow, counts), channels_of(read(slow)), slow.num_stages):
        assert share.busy + share.data + (share.bubble or 0.0) + (share.wait or 0.0) == pytest.approx(1.0)
        assert min(share.bubble or 0.0, share.wait or 0.0) >= 0.0


def test_slower_messages_are_waited_for() -> None:
    """1F1B on two stages, one micro-batch: two messages on the way of a batch, each waited for by one worker."""
    plan = replace(plan_of("1f1b", 2, 1, backward="stash"), latency_s=0.5)
    found = shares(simulated(plan, [1]), channels_of(read(plan)), 2)
    assert [share.wait for share in found] == pytest.approx([0.5 / 7.0, 0.5 / 7.0])


def test_replicas_wait_for_the_last_that_begins_their_exchange() -> None:
    port = Port(0, 0), Port(1, 0)
    exchange = Channel(0, "weight-gradient", port, port, 1, all_reduce())
    spans = [
        Span(0, "box", 0, 0, 0, 0, 0.0, 1.0, 0, 0, gives=(0,)),
        Span(1, "box", 0, 0, 0, 0, 3.0, 4.0, 0, 0, gives=(0,)),
        Span(0, "unbox", 0, 0, 0, 0, 5.0, 6.0, 0, 0, takes=(0,)),
        Span(1, "unbox", 0, 0, 0, 0, 5.0, 6.0, 0, 0, takes=(0,)),
    ]
    assert gaps_of(spans, [exchange], 2) == [
        Gap(0, "bubble", 1.0, 4.0),
        Gap(0, "wait", 4.0, 5.0),
        Gap(1, "wait", 0.0, 3.0),
        Gap(1, "wait", 4.0, 5.0),
    ]
