"""A few cells of the table of rules, and that the table sees what it is made to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest

from roundelay.ir import rule as module
from roundelay.ir.plan import Plan
from roundelay.ir.rule import register_rule, rules
from roundelay.proof.tamper_ways import WAYS
from tests.equivalence import rules_table
from tests.equivalence.cells import OPTIMIZERS, VARIANTS, Bench
from tests.equivalence.deep import LINES, OWN
from tests.equivalence.rules_table import SIZES, Cell, cells, crossed, played, ways

FEW = list(zip(cells(), ways(), strict=False))[::73]


@pytest.fixture(scope="module")
def place() -> Iterator[Bench]:
    """The model, and the rules of one's own known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})
        for rule in OWN:
            register_rule(rule)
        yield rules_table.bench()


def test_every_rule_predictor_and_mode_has_a_line() -> None:
    every = {
        (rule.name, predictor, mode)
        for rule in (*module._BUILT_IN, module.rule_named("interleaved-1f1b"))
        for predictor in (rule.predictors if rule.predicts else ("none",))
        for mode in rule.modes
        if rule.schedule != "free"  # no two runs have one order: tests/equivalence/test_free.py
    }
    assert {astuple(variant) for variant in VARIANTS.values()} == every
    assert len(LINES) == len(every) + len(OWN)


def test_the_whole_table_has_every_cell_and_the_short_one_every_line_and_size() -> None:
    whole, short = cells(), cells(short=True)
    assert len(set(whole)) == len(LINES) * len(SIZES) * len(OPTIMIZERS)
    assert {(c.line, c.stages, c.micro_batches) for c in short} == {(line, *sizes) for line in LINES for sizes in SIZES}
    assert {cell.optimizer for cell in short} == set(OPTIMIZERS)
    met = {(c.line, c.stages, c.micro_batches, way) for c, way in zip(whole, ways(), strict=False)}
    assert len(met) == len(LINES) * len(SIZES) * len(WAYS)


@pytest.mark.parametrize(("cell", "way"), FEW, ids=str)
def test_a_cell_is_as_it_should_be(cell: Cell, way: str, place: Bench) -> None:
    assert played(cell, place, way).wrong == ()


def test_the_few_cells_are_of_every_kind() -> None:
    few = [cell for cell, _ in FEW]
    assert {(cell.stages, cell.micro_batches) for cell in few} >= {(2, 1), (4, 4), (8, 1), (8, 8)}
    assert {cell.optimizer for cell in few} == set(OPTIMIZERS)


ALIKE = ("1f1b", "zb-h1", "gpipe mixed")
"""Lines that read the same."""


def test_what_reads_the_same_ends_alike_whatever_d_is_and_what_does_not_otherwise(place: Bench) -> None:
    lines = (*ALIKE, "cdp-v1", "pipedream-2bw", "async mixed", "pipeoptim improved mixed", "pipedream")
    run = [
        played(Cell(line, optimizer, stages, 4), place, WAYS[4])
        for line in lines
        for stages in (2, 4)
        for optimizer in ("sgd", "momentum")
    ]
    assert not [one.wrong for one in run if one.wrong]
    assert crossed(run) == []
    ends = {one.bits for one in run if one.cell.optimizer == "momentum"}
    # the flush, W[t-1] (both whatever D is), and two of each of the other three
    assert len(ends) == 2 + 2 * 3
    assert len({one.bits for one in run if one.cell.optimizer == "sgd"}) == len(ends) - 2, "nothing to look along"


def ignoring(place: Bench, **fields: Any) -> Callable[..., Any]:
    """`Bench.verify`, in which run and reference both ignore what the plan says."""
    real = place.verify

    def verify(plan: Plan, *rest: Any, **options: Any) -> Any:
        return real(replace(plan, **fields), *rest, **options)

    return verify


@pytest.mark.parametrize(
    ("line", "other", "fields"),
    [
        ("pipeoptim improved mixed", "async mixed", {"rule": "async", "predictor": "none"}),
        ("pipeoptim paper mixed", "pipeoptim improved mixed", {"predictor": "improved"}),
        ("async recompute", "async mixed", {"backward": "mixed"}),
    ],
    ids=["rule", "predictor", "mode"],
)
def test_what_a_run_and_its_reference_both_ignore_is_seen(
    line: str, other: str, fields: dict[str, Any], place: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = played(Cell(other, "momentum", 4, 1), place, "drop-update")
    monkeypatch.setattr(place, "verify", ignoring(place, **fields))
    ignored = played(Cell(line, "momentum", 4, 1), place, "drop-update")
    assert (right.wrong, ignored.wrong) == ((), ()), "each by itself looks well"
    assert crossed([right, ignored]) == [f"{right.cell} and {ignored.cell}: the same weights, other reads"]


def test_an_m_that_is_ignored_is_seen(place: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "verify", ignoring(place, micro_batches=1))
    found = played(Cell("1f1b", "momentum", 4, 4), place, "drop-update")
    assert "5 updates of 5 micro-batches" in found.wrong
