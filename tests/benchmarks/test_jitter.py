"""The benchmark of jitter: its durations are a seed's, its steps and links are what can be counted by hand."""

from __future__ import annotations

import statistics
import sys
from functools import partial

import pytest

from benchmarks.cdp import jitter, jitter_real
from benchmarks.cdp.jitter_durations import CUT, RULES, Kind, Variation, counted, factors, own_means, step_s
from benchmarks.cdp.jitter_simulated import Case, Measured, measure, most_within, plan_of, run_of

SIZE, BATCHES, SEED = 4, 20, 7
BY_BATCH = Variation("batch", 0.2)


def measured(rule: str, variation: Variation, size: int = SIZE, transfer: float = 0.0) -> Measured:
    return measure(Case(size, rule, transfer, variation, BATCHES, SEED))


@pytest.mark.parametrize("kind", ["action", "batch"])
def test_the_same_seed_gives_the_same_durations(kind: Kind) -> None:
    drawn = partial(factors, Variation(kind, 0.2), SIZE)
    assert drawn(BATCHES, SEED) == drawn(BATCHES, SEED)
    assert drawn(BATCHES, SEED) != drawn(BATCHES, SEED + 1)
    assert drawn(BATCHES + 5, SEED)[:BATCHES] == drawn(BATCHES, SEED)


def test_durations_vary_as_much_as_is_asked_for() -> None:
    drawn = [x for batch in factors(Variation("action", 0.3), 8, 50, SEED) for worker in batch for x in worker]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.01)
    assert statistics.stdev(drawn) == pytest.approx(0.3, abs=0.01)
    assert 0 < 1.0 - 0.3 * CUT <= min(drawn) < max(drawn) <= 1.0 + 0.3 * CUT


def test_one_factor_may_hold_for_a_batch_of_a_worker() -> None:
    for batch in factors(BY_BATCH, SIZE, BATCHES, SEED):
        assert [len(set(of_worker)) for of_worker in batch] == [1] * SIZE
        assert len({of_worker[0] for of_worker in batch}) == SIZE


@pytest.mark.parametrize("rule", RULES.values())
def test_all_rules_meet_the_same_durations(rule: str) -> None:
    drawn = factors(Variation("action", 0.2), SIZE, BATCHES, SEED)
    for one in run_of(plan_of(SIZE, rule), drawn).intervals:
        if one.opcode in ("forward", "backward"):
            of_worker = drawn[one.g][one.worker]
            action = one.stage if one.opcode == "forward" else SIZE + one.stage
            assert one.end_s - one.start_s == pytest.approx(of_worker[action])


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("rule", RULES.values())
def test_without_variation_and_transfers_a_step_is_two_for_each_stage(rule: str, size: int) -> None:
    found = measured(rule, Variation(), size)
    assert (found.step, found.floor, found.waiting) == (1.0, 1.0, 0.0)


def test_the_last_all_reduce_is_exposed_and_what_cdp_v1_sends_is_not() -> None:
    at = partial(measured, variation=Variation(), transfer=0.5)
    exposed = 0.5 * 2 * (SIZE - 1) / SIZE
    assert at("1f1b").step == pytest.approx(1.0 + exposed / (2 * SIZE), abs=1e-3)
    assert at("cdp-v1").step == 1.0
    assert 1.0 <= at("cdp-v2").step < at("1f1b").step


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("transfer", [0.0, 0.5])
def test_staggered_steps_are_shorter_where_workers_vary(size: int, transfer: float) -> None:
    steps = {rule: measured(rule, BY_BATCH, size, transfer).step for rule in RULES.values()}
    assert max(steps["cdp-v1"], steps["cdp-v2"]) < 0.95 * steps["1f1b"]


def test_a_synchronous_step_is_as_long_as_its_slowest_worker_s() -> None:
    drawn = factors(BY_BATCH, SIZE, BATCHES, SEED)
    slowest = statistics.fmean(max(of_worker[0] for of_worker in drawn[batch]) for batch in counted(BATCHES))
    assert measured("1f1b", BY_BATCH).step == pytest.approx(slowest, rel=0.02)
    assert max(own_means(drawn)) < 0.95 * slowest


def test_links_carry_what_can_be_counted() -> None:
    synchronous, staggered = (measured(rule, Variation()) for rule in ("1f1b", "cdp-v1"))
    assert synchronous.link == synchronous.network == 2 * (SIZE - 1) / SIZE  # all at once
    assert staggered.link == 2.0  # a partial sum of one batch, and a total of the batch before
    assert staggered.network <= 1.0


def test_a_window_of_a_time_step_ends_before_the_next_one() -> None:
    assert most_within([(0.0, 3), (1.0, 4), (1.5, 2), (9.0, 5)]) == 6
    assert most_within([]) == 0


def test_a_table_has_a_number_for_each_sigma() -> None:
    every = [case for case in jitter.cases([4], 2) if case.transfer == 0.0]
    found = {case: Measured(1.0 + case.variation.sigma + case.seed, 1.0, 0.5, 2.0, 1.0) for case in every}
    table = jitter.tables(found)
    assert "| per action | 4 | 0 |" + 3 * " 1.600 / 1.700 / 1.800 |" + " 1.000 / 1.000 / 1.000 |" in table
    assert "| none | 4 | 0 | 1.000 | 1.000 | 1.000 | 1.000 |" in table


def test_options_of_the_real_one_are_refused_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["jitter", "--short"])
    with pytest.raises(SystemExit):
        jitter.main()
    assert "only with --real: --short" in capsys.readouterr().err


@pytest.mark.parametrize("rule", RULES.values())
def test_processes_take_the_durations_that_were_drawn(rule: str) -> None:
    drawn, time_step_s = factors(Variation("action", 0.2), jitter_real.SIZE, 8, SEED), 0.004
    events = jitter_real.trained(rule, drawn, time_step_s)
    assert sorted(events) == list(range(jitter_real.SIZE))
    for worker, of_worker in events.items():
        took = [one for one in of_worker if one.opcode in jitter_real.HANDLERS]
        assert len(took) == 2 * jitter_real.SIZE * len(drawn)
        for one in took:
            action = one.stage + jitter_real.SIZE * (one.opcode == "backward")
            assert one.end_s - one.start_s >= time_step_s * drawn[one.g][worker][action] - 1e-5
    assert step_s(events.values(), len(drawn)) >= 2 * jitter_real.SIZE * time_step_s * 0.8
