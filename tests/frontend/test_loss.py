"""The loss as the last segment: what it reads travels, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.errors import JobError
from roundelay.frontend import Captured, capture
from roundelay.ir.graph import COUNT, LOSS
from tests.frontend.cutting import DRAW, captured_of, cut_after, even_cuts, run, weights_of

Loss = Callable[[Any, Any], Any]


class Heads(nn.Module):
    """Returns several tensors, one of them twice, and one of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return logits, the same again, a second head and x."""
        hidden = self.body(x).tanh()
        logits = self.head(hidden)
        return {"logits": logits, "again": logits, "other": self.other(hidden), "input": x, "scale": 2.0}


def batch_of(seed: int = 0) -> dict[str, Any]:
    """What no loss reads is there too."""
    draws = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, 6, generator=draws),
        "labels": torch.randint(0, 5, (4,), generator=draws),
        "weights": torch.rand(4, generator=draws),
        "name": "text",
        "temperature": 0.5,
    }


def only_x(batch: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (batch["x"],), {}


def captured_with(loss: Loss) -> Captured:
    torch.manual_seed(0)
    return capture(Heads(), loss, batch_of(), only_x)


def entropy(outputs: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs["logits"], batch["labels"])


def matches_eager(captured: Captured, loss: Loss) -> bool:
    """Loss and gradients of two stages on another batch, against the module's own."""
    model, batch = captured.model, batch_of(1)
    model.zero_grad()
    wanted = loss(model(batch["x"].clone()), batch)
    wanted.backward()
    wanted = wanted.reshape(())
    done = run(captured, cut_after(captured, [1]), batch_of(1), weights_of(captured))
    own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.equal(done.loss, wanted.detach()) and all(torch.equal(done.grads[n], own[n]) for n in own)


READS: dict[str, tuple[Loss, set[str], set[str]]] = {
    "logits and labels": (entropy, {"linear_1"}, {"batch.labels"}),
    "logits only": (lambda o, b: o["logits"].square().mean(), {"linear_1"}, set()),
    "second name of a tensor": (lambda o, b: entropy({"logits": o["again"]}, b), {"linear_1"}, {"batch.labels"}),
    "both names of a tensor": (lambda o, b: (o["again"] * o["logits"]).mean(), {"linear_1"}, set()),
    "two outputs": (lambda o, b: (o["logits"] * o["other"]).mean(), {"linear_1", "linear_2"}, set()),
    "an input handed through": (lambda o, b: (o["logits"] * o["input"].mean()).mean(), {"linear_1", "input.0"}, set()),
    "the batch's own copy of it": (lambda o, b: o["logits"].mean() * b["x"].mean(), {"linear_1"}, {"batch.x"}),
    "only the shape": (lambda o, b: o["logits"].sum() / b["weights"].shape[0], {"linear_1"}, {"batch.weights"}),
    "only the length": (lambda o, b: o["logits"].sum() / len(b["weights"]), {"linear_1"}, {"batch.weights"}),
    "only an item": (lambda o, b: o["logits"].mean() * b["weights"][0].item(), {"linear_1"}, {"batch.weights"}),
    "a number of the result": (lambda o, b: o["logits"].mean() * o["scale"], {"linear_1"}, set()),
    "one element": (lambda o, b: o["logits"].mean().reshape(1, 1), {"linear_1"}, set()),
}


@pytest.mark.parametrize("name", READS)
def test_only_what_the_loss_reads_travels(name: str) -> None:
    loss, outputs, fields = READS[name]
    captured = captured_with(loss)
    assert set(captured.graph.outputs) == outputs
    assert set(captured.graph.batch) == fields | {"batch.temperature"}  # numbers are always sent
    assert ("linear_2" in {op.name for op in captured.graph.ops}) == ("linear_2" in outputs)
    assert matches_eager(captured, loss)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_classifier", "t5"])
def test_a_loss_that_the_model_computed_needs_nothing_of_the_batch(name: str) -> None:
    graph = captured_of(name).graph
    assert graph.batch == ()
    assert len([name for name in graph.outputs if "count_labels" not in name]) == 1
    assert graph.values[graph.outputs[0]].shape == ()


def test_labels_go_to_the_last_stage_alone() -> None:
    captured = captured_with(entropy)
    first, second, last = even_cuts(captured, 3).stages
    assert "batch.labels" in last.loss_reads
    for stage in (first, second):
        assert "batch.labels" not in {name for segment in stage.segments for name in segment.inputs}


def later(reads: Loss) -> tuple[Loss, list[bool]]:
    """A loss that reads more once there is anything in the list."""
    captured: list[bool] = []

    def loss(outputs: Any, batch: Any) -> Tensor:
        return reads(outputs, batch) if captured else entropy(outputs, batch)

    return loss, captured


@pytest.mark.parametrize(
    ("reads", "what"),
    [
        (lambda o, b: o["logits"].mean() * b["weights"].mean(), "batch field 'weights'"),
        (lambda o, b: (o["logits"].mean(1) * b["weights"]).mean(), "batch field 'weights'"),
        (lambda o, b: functional.mse_loss(o["logits"].mean(1), b["weights"]), "batch field 'weights'"),
        (lambda o, b: functional.cross_entropy(o["other"], b["labels"]), "output 2"),
        (lambda o, b: (o["logits"] + o["other"]).mean(), "output 2"),
    ],
)
def test_what_was_not_read_on_the_first_batch_is_told_by_name_when_it_is_read_later(reads: Loss, what: str) -> None:
    loss, reads_more = later(reads)
    captured = captured_with(loss)
    reads_more.append(True)
    with pytest.raises(JobError, match=what):
        run(captured, cut_after(captured, []), batch_of(), weights_of(captured))


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda o, b: o["logits"].mean() if b["name"] == "text" else o["other"].mean(), "batch field 'name', a str"),
    ],
)
def test_a_loss_may_not_read_what_is_no_tensor_as_it_would_be_the_first_batchs_for_ever(loss: Loss, what: str) -> None:
    with pytest.raises(JobError, match=what):
        captured_with(loss)


@pytest.mark.parametrize(
    "count", [lambda b: (b["labels"] >= 0).sum(), lambda b: 3.0, lambda b: 3, lambda b: b["weights"].ceil().sum()]
)
def test_a_sum_and_a_count_come_apart(count: Callable[[Any], Any]) -> None:
    def loss(outputs: Any, batch: Any) -> tuple[Tensor, Any]:
        return functional.cross_entropy(outputs["logits"], batch["labels"], reduction="sum"), count(batch)

    captured = captured_with(loss)
    assert captured.graph.loss_counts
    done = run(captured, even_cuts(captured, 2), batch_of(1), weights_of(captured))
    assert done.count is not None
    assert done.count.shape == ()
    assert float(done.count) == pytest.approx(float(count(batch_of(1))))
    own = loss(captured.model(batch_of(1)["x"]), batch_of(1))
    assert torch.equal(done.loss, own[0].detach())
    assert not captured_with(entropy).graph.loss_counts


def test_a_loss_alone_in_a_tuple_has_no_count() -> None:
    captured = captured_with(lambda o, b: (entropy(o, b),))
    assert not captured.graph.loss_counts
    done = run(captured, even_cuts(captured, 2), batch_of(), weights_of(captured))
    assert done.count is None
    assert COUNT not in done.forwards[-1].outputs


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda o, b: o["logits"], r"tensor of shape \(4, 5\)"),
        (lambda o, b: functional.cross_entropy(o["logits"], b["labels"], reduction="none"), r"tensor of shape \(4,\)"),
        (lambda o, b: o["logits"].argmax().sum(), "torch.int64"),
        (lambda o, b: 3.0, "3.0"),
        (lambda o, b: None, "None"),
        (lambda o, b: (o["logits"].mean(), torch.ones(2)), r"and tensor of shape \(2,\)"),
        (lambda o, b: (o["logits"].mean(), 1, 2), "and 1 and 2"),
        (lambda o, b: o["logits"].mean().detach(), "no gradient enters"),
        (lambda o, b: b["weights"].mean(), "no gradient enters"),
        (lambda o, b: b["lables"], r"KeyError: 'lables'.*'labels'"),
    ],
)
def test_a_loss_that_is_no_differentiable_scalar_is_refused_at_capture(loss: Loss, got: str) -> None:
    with pytest.raises(JobError, match=got):
        captured_with(loss)


def halves(outputs: Any, batch: Any) -> Tensor:
    outputs["logits"].div_(2.0)
    return entropy(outputs, batch)


def shifts(outputs: Any, batch: Any) -> Tensor:
    batch["labels"].add_(1).remainder_(5)
    return entropy(outputs, batch)


@pytest.mark.parametrize("loss", [halves, shifts])
def test_a_loss_that_writes_into_what_it_reads_equals_eager_and_leaves_the_batch_alone(loss: Loss) -> None:
    captured = captured_with(loss)
    assert matches_eager(captured, loss)
    batch, cut = batch_of(1), cut_after(captured, [1])
    grads = [run(captured, cut, batch, weights_of(captured), mode=mode).grads for mode in ("stash", "recompute")]
    assert torch.equal(batch["labels"], batch_of(1)["labels"])
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_a_field_that_a_later_batch_lacks_is_named() -> None:
    captured = captured_with(entropy)
    with pytest.raises(JobError, match="no tensor 'labels' and no 'temperature', only 'x', 'weights'"):
        captured.values({"x": torch.zeros(4, 6), "weights": torch.zeros(4)})


def test_the_loss_runs_on_the_last_stage_with_its_own_gradient_seed() -> None:
    captured = captured_with(entropy)
    done = run(captured, even_cuts(captured, 2), batch_of(), weights_of(captured))
    last = done.forwards[-1]
    _, tape = last.function.forward(last.params, {}, last.inputs, DRAW, mode="stash")
    _, halved = last.function.backward(tape, {LOSS: torch.tensor(0.5)}, {})
    assert all(torch.allclose(halved[n] * 2, done.grads[n]) for n in halved)
    assert halved


def test_a_loss_may_read_a_number_of_the_batch_which_is_that_of_each_batch() -> None:
    captured = captured_with(lambda o, b: o["logits"].mean() * b["temperature"])
    assert "batch.temperature" in captured.graph.batch
    one, other = batch_of(), {**batch_of(), "temperature": 3.0}
    cut, weights = cut_after(captured, []), weights_of(captured)
    first, second = (run(captured, cut, batch, weights).loss for batch in (one, other))
    assert torch.equal(second, first / one["temperature"] * 3.0)
