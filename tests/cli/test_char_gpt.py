"""The default job: real text, and a loss below that of a model which ignores all context."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import roundelay
from roundelay.ir.graph import Graph
from roundelay.planning.job_file import load_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_gpt.py"
STEPS = 40


@pytest.mark.timeout(400)  # ten seconds of two cores, or minutes on a busy machine
def test_the_default_job_falls_below_the_unigram_entropy_within_its_first_updates() -> None:
    job = load_job(EXAMPLE, 0)
    captured = roundelay.capture(job)
    assert isinstance(captured.graph, Graph)
    assert 2e6 < sum(p.num_bytes for p in captured.graph.parameters.values()) / 4 < 1e7
    trained = roundelay.train(job, plan=roundelay.plan(job, captured=captured, workers=2), steps=STEPS)
    entropy = trained.evaluations[-1].metrics["unigram_entropy"]
    assert 2.5 < entropy < 4.0
    last = [update.loss for update in trained.updates[-5:]]
    assert trained.updates[0].loss > entropy > sum(last) / 5 + 0.2
    assert trained.evaluations[-1].metrics["held_out_loss"] < entropy - 0.2
    module = sys.modules["char_gpt"]
    written = module.showcase(job.model, length=12)
    assert written.startswith("def ")
    assert len(written) == len("def ") + 12
