"""The table of models is whole, and says so when a cell is not equal."""

from __future__ import annotations

from itertools import product

import pytest

from roundelay.runtime import handlers
from tests.equivalence.cells import Bench
from tests.models.table import EQUAL, LINES, NAMES, STAGES, Cell, cells, outcome
from tests.zoo import MODELS

ASKED = {"1f1b", "pipedream", "pipeoptim", "cdp-v2"}


def test_every_model_meets_every_rule_and_number_of_stages_with_lengths_that_vary() -> None:
    every = cells()
    assert {line.split()[0] for line, _ in LINES} == ASKED
    fixed = {(c.model, (c.variant, c.micro_batches), c.stages) for c in every if not c.varying}
    assert fixed == set(product(NAMES, LINES, STAGES))
    assert all(MODELS[name].varies for name in NAMES)
    varying = {(c.model, (c.variant, c.micro_batches), c.stages) for c in every if c.varying}
    assert varying == set(product(NAMES, LINES, STAGES))
    assert {c.optimizer for c in every if c.model == "gpt2"} == {"adamw", "nesterov"}


def test_a_cell_that_is_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Bench(MODELS["two_inputs_tied"])
    cell = Cell("two_inputs_tied", "pipedream", 4, 2, varying=True)
    assert outcome(cell, place) == EQUAL
    real = handlers.HANDLERS["update"]
    monkeypatch.setitem(handlers.HANDLERS, "update", lambda context, run: real(context, run) if run.g > 4 else None)
    assert outcome(cell, place) != EQUAL
