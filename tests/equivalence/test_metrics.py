"""Metrics that the loss returns beside the loss: weighed as it is, proved as it is, and told wherever it is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

import roundelay
from roundelay.comparison.comparison_table import Aims, table
from roundelay.errors import JobError
from roundelay.job import Job, Named
from roundelay.runtime import handlers
from roundelay.session.training import Length, Session

MOMENTUM: Callable[[Named], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)
ROWS = [(torch.randn(7, 6), torch.arange(7) % 3) for _ in range(3)]
"""Seven rows make unequal micro-batches."""


def told(outputs: Tensor, batch: Any) -> dict[str, Any]:
    """The mean loss; a mean over rows, a pair, and a number that is none."""
    right = (outputs.argmax(-1) == batch[1]).float()
    of_class = batch[1] == 1
    return {
        "loss": functional.cross_entropy(outputs, batch[1]),
        "accuracy": right.mean(),
        "recall": ((right * of_class).sum(), of_class.sum()),
        "never": float("nan"),
    }


def job(loss: Callable[[Any, Any], Any] = told, **more: Any) -> Job:
    """A small classifier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return Job(model=model, loss=loss, batches=lambda epoch: ROWS, optimizer=MOMENTUM, **more)


def planned(made: Job, rule: str = "1f1b", **choices: Any) -> roundelay.Plan:
    """Three stages, three micro-batches."""
    return roundelay.plan(made, workers=3, rule=rule, micro_batches=3, cuts="equal", **choices)


def test_they_are_those_of_the_whole_batch() -> None:
    made = job()
    updates = roundelay.train(made, plan=planned(made), steps=3).updates
    model = job().model
    optimizer = MOMENTUM(list(model.named_parameters()))
    for update, batch in zip(updates, ROWS, strict=True):
        whole = told(model(batch[0]), batch)
        assert update.loss == pytest.approx(whole["loss"].item(), rel=1e-5)
        assert update.metrics["accuracy"] == pytest.approx(whole["accuracy"].item(), rel=1e-6)
        right, terms = whole["recall"]
        assert 0 < terms < 7
        assert update.metrics["recall"] == pytest.approx((right / terms).item(), rel=1e-6)
        assert update.metrics["never"] != update.metrics["never"]
        whole["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["stash", "recompute", "mixed"])
def test_nothing_of_the_training_changes(mode: str) -> None:
    """The weights are those of the loss alone, whose plan fits as well."""
    alone = job(lambda outputs, batch: functional.cross_entropy(outputs, batch[1]))
    beside = job()
    plan = planned(alone, "pipeoptim", backward=mode)
    ran = [roundelay.train(made, plan=plan, steps=3) for made in (alone, beside)]
    assert [u.loss for u in ran[0].updates] == [u.loss for u in ran[1].updates]
    assert all(torch.equal(w, ran[1].snapshot.parameters[n]) for n, w in ran[0].snapshot.parameters.items())
    assert not ran[0].updates[0].metrics


@pytest.mark.parametrize(("transport", "precision"), [("memory", "bf16"), ("shm", "fp32"), ("gloo", "fp32")])
def test_verify_compares_them(transport: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    plan = planned(made, "pipeoptim", transport=transport, precision=precision)
    captured = roundelay.capture(made)
    assert roundelay.verify(made, plan=plan, steps=3).equal
    right = handlers._report_loss

    def wrong(context: Any, header: Any, outputs: dict[str, Any]) -> None:
        right(context, header, outputs | {"metric.accuracy": outputs["metric.accuracy"] + 1e-9})

    monkeypatch.setattr(handlers, "_report_loss", wrong)
    assert "metrics of the loss" in roundelay.verify(made, plan=plan, steps=3).difference
    assert Session(made, captured, plan, 0, Length(steps=1)).captured.graph.metrics == (
        "metric.accuracy",
        "metric.recall",
        "metric-count.recall",
        "metric.never",
    )


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda o, b: {"accuracy": o.mean()}, r"got a mapping with 'accuracy'; expected an entry 'loss'"),
        (lambda o, b: {"loss": o.mean(), 3: o.mean()}, r"got a mapping with 'loss', 3"),
        (lambda o, b: {"loss": o.mean(), "each": o}, r"the metric 'each' returned with the loss: got tensor of shape"),
        (lambda o, b: {"loss": o.mean(), "word": "good"}, r"the metric 'word' returned with the loss: got 'good'"),
        (
            lambda o, b: {"loss": o.mean(), "three": (1, 2, 3)},
            r"the metric 'three' returned with the loss: got \(1, 2, 3\)",
        ),
    ],
)
def test_what_is_no_metric_is_refused(loss: Callable[[Any, Any], Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        roundelay.capture(job(loss))


def test_other_metrics_than_the_first_batch_s_are_refused_in_their_place() -> None:
    def metric(outputs: Tensor, batch: Any, *, other: bool) -> dict[str, Any]:
        same = len(batch[1]) == len(ROWS[0][1])
        return {"loss": outputs.mean(), "a": 1.0} if same or not other else {"loss": outputs.mean(), "b": (1.0, 2.0)}

    made = job(partial(metric, other=True))
    captured = roundelay.capture(made)
    plan = planned(job(partial(metric, other=False)))
    with pytest.raises(JobError, match=r"micro-batch 0.*got b as \(sum, count\); expected a, as on the first batch"):
        Session(made, captured, plan, 0, Length(steps=1)).run(notify=lambda event: None)


def test_a_comparison_has_a_column_for_each(tmp_path: Path) -> None:
    def make(seed: int) -> Job:
        return job(evaluate=lambda model: {"accuracy": 0.5, "train.accuracy": 0.25})

    compared = roundelay.compare(make, out=tmp_path, rules=["1f1b", "async"], seeds=1, steps=3, workers=2)
    curves = next(iter(compared.results.values())).curves
    assert [len(curves[name]) for name in ("loss", "train.accuracy", "train.recall", "train.never")] == [3] * 4
    assert curves["accuracy"][-1].value == 0.5
    assert curves["evaluate.train.accuracy"][-1].value == 0.25
    titles = [cell.title for cell in table(compared, Aims({}, {}))[0]]
    assert {"train.recall, last", "train.recall, best", "accuracy, last"} <= set(titles)
