"""Into how many parts a batch is cut: by default only where they train what plain PyTorch trains on the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundelay
from roundelay.errors import DivergedError, JobError, PlanError, RoundelayError
from roundelay.job import Job
from roundelay.planner.plan_options import Choices
from roundelay.planning.make_plan import Planned
from roundelay.planning.planning import plan_with_reasons
from roundelay.session.training import Trained
from tests.api.jobs import make

Loss = Callable[[Any, Any], Any]
IGNORED = -100


def data(rows: Sequence[int] = (8, 8, 8), seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=draws), torch.randint(4, (n,), generator=draws)) for n in rows]


def unlabelled() -> list[tuple[Tensor, Tensor]]:
    """The second batch's first rows have no label, as many as a micro-batch has, and one of another."""
    batches = data()
    batches[1][1][:3] = IGNORED
    return batches


def net(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *between, nn.ReLU(), nn.Linear(16, 4))


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def summed(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="sum")


def job(loss: Loss = entropy, batches: Any = None, model: nn.Module | None = None, **changes: Any) -> Job:
    own = data() if batches is None else batches
    return Job(
        model=net() if model is None else model,
        loss=loss,
        batches=lambda epoch: own,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9),
        **changes,
    )


def planned(made: Job, **choices: Any) -> Planned:
    return plan_with_reasons(made, Choices(**{"workers": 2, "rule": "1f1b", **choices}))


def trained(made: Job, **choices: Any) -> Trained:
    return roundelay.train(made, steps=3, workers=2, rule="1f1b", **choices)


def plain(made: Job, loss: Loss) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three updates in plain PyTorch."""
    optimizer, losses = made.optimizer(list(made.model.named_parameters())), []
    for batch in made.batches(0):
        optimizer.zero_grad()
        value = loss(made.model(batch[0]), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, {name: p.detach().clone() for name, p in made.model.named_parameters()}


def assert_as_plain(loss: Loss, batches: Any, *, exact: bool = False, **choices: Any) -> None:
    losses, weights = plain(job(loss, batches), loss)
    made = job(loss, batches)
    ours = [update.loss for update in trained(made, **choices).updates]
    tolerance: dict[str, float] = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], **tolerance)
    assert ours == (losses if exact else pytest.approx(losses, rel=1e-5))


def test_several_parts_where_their_mean_is_the_whole() -> None:
    found = planned(job())
    assert found.plan.micro_batches == 4
    assert found.notices == ()


def test_one_part_and_why_where_the_loss_is_another() -> None:
    found = planned(job(summed))
    (told,) = found.notices
    assert found.plan.micro_batches == 1
    assert told.startswith("1 micro-batch for each batch, not 4, as the loss of the first batch is ")
    assert "(sum, count); --micro-batches 4" in told
    assert told in found.reasons


def test_a_sum_over_the_batch_trains_as_in_plain_pytorch() -> None:
    assert_as_plain(summed, data(), exact=True)


def test_what_is_asked_for_is_obeyed_and_warned_of() -> None:
    found = planned(job(summed), micro_batches=2)
    assert found.plan.micro_batches == 2
    assert found.notices[0].startswith("warning: the loss of the first batch is ")
    assert planned(job(summed), micro_batches=1).notices == ()
    assert planned(job(), micro_batches=2).notices == ()


def test_batch_norm_keeps_whole_batches_and_is_told_what_parts_would_gain() -> None:
    found = planned(job(model=net(nn.BatchNorm1d(16))))
    assert found.plan.micro_batches == 1
    assert "not 4, so that BatchNorm takes its statistics over whole batches, as in plain PyTorch" in found.notices[0]
    assert "lets 2 workers compute at the same time: at most 1.6 times" in found.notices[0]


def test_batch_norm_is_cut_where_that_is_asked_for_and_told() -> None:
    found = planned(job(model=net(nn.BatchNorm1d(16))), micro_batches=4)
    assert found.plan.micro_batches == 4
    assert "BatchNorm takes its statistics over each of 4" in found.notices[0]


@pytest.mark.parametrize("rule", ["pipedream-2bw", "cdp-v2"])
def test_a_rule_that_needs_parts_is_refused_where_there_should_be_none(rule: str) -> None:
    with pytest.raises(PlanError, match="the loss of the first batch") as caught:
        planned(job(summed), rule=rule)
    assert rule in caught.value.subject
    assert planned(job(summed), rule=rule, micro_batches=2).plan.micro_batches == 2


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_an_accuracy_is_no_count(value: float) -> None:
    with pytest.raises(JobError, match="the pair that the loss returns") as caught:
        planned(job(lambda o, b: (entropy(o, b), value + 0.0 * o.detach().sum())), rule="pipeoptim")
    assert '"accuracy"' in caught.value.remedy


def test_an_accuracy_that_looked_like_a_count_is_found_later() -> None:
    """A batch of one row has no parts by which it could be seen."""
    labels = [torch.tensor([0]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0])]
    right = [(x, y) for (x, _), y in zip(data((1, 3, 3)), labels, strict=True)]
    made = job(lambda o, b: (entropy(o, b), (b[1] == 0).float().mean()), right)
    with pytest.raises(RoundelayError, match=r"0\.333"):
        trained(made)


def test_two_rows_at_least_under_batch_norm() -> None:
    made = job(batches=data((8, 5, 3)), model=net(nn.BatchNorm1d(16)))
    done = trained(made, micro_batches=4)
    assert len(done.micro_losses) == 4 + 2 + 1
    assert all(bool(buffer.isfinite().all()) for buffer in made.model.buffers())


def test_batch_norm_in_three_stages_with_more_parts_than_pairs_of_rows() -> None:
    made = make()
    done = roundelay.verify(made, steps=2, workers=3, rule="1f1b", micro_batches=6)
    assert done.equal
    assert all(bool(buffer.isfinite().all()) for buffer in made.model.buffers())


def test_a_batch_of_one_row_under_batch_norm_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(RoundelayError, match=r"Expected more than 1 value per channel .* torch.Size\(\[1, 16\]\)"):
        trained(job(batches=data((8, 1)), model=net(nn.BatchNorm1d(16))))


LABELLED: dict[str, Loss] = {
    "ignored": entropy,
    "of classes that are weighed": lambda o, b: F.cross_entropy(o, b[1], torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "smoothed": lambda o, b: F.cross_entropy(o, b[1], label_smoothing=0.1),
    "of log-probabilities": lambda o, b: F.nll_loss(F.log_softmax(o, -1), b[1]),
    "chosen by a mask": lambda o, b: F.cross_entropy(o[b[1] >= 0], b[1][b[1] >= 0]),
    "beside a metric": lambda o, b: {"loss": entropy(o, b), "mean": o.mean()},
}


@pytest.mark.parametrize("name", LABELLED)
def test_a_mean_over_labels_is_that_of_the_whole_batch(name: str) -> None:
    loss = LABELLED[name]

    def alone(outputs: Tensor, batch: Any) -> Tensor:
        value = loss(outputs, batch)
        return value["loss"] if isinstance(value, dict) else value

    losses, weights = plain(job(batches=unlabelled()), alone)
    made = job(loss, unlabelled())
    done = trained(made)
    assert done.plan.micro_batches == 4
    assert [update.loss for update in done.updates] == pytest.approx(losses, rel=1e-5)
    for key, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[key], rtol=1e-4, atol=1e-6)


def test_in_one_piece_its_bits_are_those_of_plain_pytorch() -> None:
    assert_as_plain(entropy, unlabelled(), exact=True, micro_batches=1)


class Owner(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean over labels."""
        return F.cross_entropy(self.net(x), y)


CHOICES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "clipped": {"clip": "global:0.1"},
    "halves": {"rule": "zb-h1"},
    "partial": {"rule": "rehearse", "micro_batches": 4},
    "scaled": {"precision": "fp16", "loss_scale": "256"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_run_and_reference_weigh_labels_alike(name: str) -> None:
    made = job(lambda o, _: o, unlabelled(), Owner(), inputs=lambda batch: (batch, {}))
    assert roundelay.verify(made, steps=3, **{"workers": 2, "rule": "1f1b", **CHOICES[name]}).equal


def other_at_three_rows(outputs: Tensor, batch: Any) -> Tensor:
    """Something else than the mean of a cross entropy."""
    return (
        entropy(outputs, batch) * (2.0 if len(outputs) == 3 else 1.0) if len(outputs) <= 4 else entropy(outputs, batch)
    )


def test_a_loss_of_another_kind_than_before_is_refused_where_labels_weigh_parts() -> None:
    with pytest.raises(RoundelayError, match="a value other than the mean of a cross entropy"):
        trained(job(other_at_three_rows, data((12, 6))), micro_batches=2)


def test_whole_batches_may_have_a_loss_of_another_kind() -> None:
    assert_as_plain(other_at_three_rows, data((8, 3, 8)), exact=True, micro_batches=1)


def late(outputs: Tensor, batch: Any) -> Tensor:
    """A mean that labels of the second batch leave out, by a mask of its own."""
    kept = (batch[1] != IGNORED).float()
    return (of_rows(outputs, batch) * kept).sum() / kept.sum()


def of_rows(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1], reduction="none", ignore_index=IGNORED)


def clipped(outputs: Tensor, batch: Any) -> Tensor:
    """Begins below the bound that it has later."""
    return entropy(outputs, batch) + F.relu(outputs.pow(2).mean() - 0.5).square()


@pytest.mark.parametrize(
    ("loss", "batches", "why"),
    [
        (late, unlabelled(), "the loss of batch 1 "),
        (clipped, data(), "of the first 3 rows of the first batch, with other weights, "),
    ],
)
def test_what_only_later_is_no_mean_of_its_parts_is_seen(loss: Loss, batches: Any, why: str) -> None:
    found = planned(job(loss, batches))
    assert (found.plan.micro_batches, why in found.notices[0]) == (1, True), found.notices
    assert_as_plain(loss, batches)


class Balanced(nn.Module):
    """Returns its own loss, with a small term that compares the shares of two experts over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gate = net(), nn.Linear(6, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """One number."""
        return F.cross_entropy(self.net(x), y) + 2e-4 * self.gate(x).softmax(-1).mean(0).square().sum()


def test_a_model_s_own_loss_is_looked_at_by_its_parameters() -> None:
    made = job(lambda o, _: o, data(), Balanced(), inputs=lambda batch: (batch, {}))
    found = planned(made)
    assert found.plan.micro_batches == 1
    assert "another gradient" in found.notices[0]


def graphs() -> list[dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.randn(n, 6, generator=draws),
            "edges": torch.randint(n, (2, 20), generator=draws),
            "y": torch.randint(4, (n,), generator=draws),
        }
        for n in (10, 11, 12)
    ]


class Neighbours(nn.Module):
    """Adds what is known of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = net()[0], net()[2]

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Nodes x 4."""
        hidden = torch.relu(self.first(x))
        made: Tensor = self.last(hidden.index_add(0, edges[1], hidden[edges[0]]))
        return made


def test_batches_without_common_rows_are_trained_whole() -> None:
    made = job(
        lambda o, b: F.cross_entropy(o, b["y"]),
        graphs(),
        Neighbours(),
        inputs=lambda batch: ((batch["x"], batch["edges"]), {}),
    )
    found = planned(made)
    assert found.plan.micro_batches == 1
    assert "different numbers of rows" in found.notices[0]
    assert "--micro-batches" not in found.notices[0]
    assert roundelay.verify(made, steps=3, workers=2, rule="1f1b").equal
    with pytest.raises(JobError, match="to be cut into 2 parts") as caught:
        planned(made, micro_batches=2)
    assert "--micro-batches 1" in caught.value.remedy


def spoilt(at: int) -> list[tuple[Tensor, Tensor]]:
    batches = data()
    batches[at][0][7] = float("nan")
    return batches


@pytest.mark.parametrize(
    ("at", "micro_batches", "remedy"),
    [
        (0, 1, "No update was made before it"),
        (1, 1, "Lower the learning rate"),
        (1, 4, "return \\(sum, count\\), or give --micro-batches 1"),
    ],
)
def test_each_cause_of_a_loss_that_is_no_number_has_its_remedy(at: int, micro_batches: int, remedy: str) -> None:
    with pytest.raises(DivergedError, match=remedy):
        trained(job(lambda o, b: F.mse_loss(o, o.detach() + 1), spoilt(at)), micro_batches=micro_batches)
