"""Without options a job trains what it trains in plain PyTorch, and a person is told of what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundelay
from roundelay import Job
from roundelay.ir.plan import Plan
from roundelay.planner.plan_options import Choices
from roundelay.planning import make_plan as making
from roundelay.planning.default_workers import cores_notice, staleness
from roundelay.planning.explain_plan import plan_notices
from roundelay.planning.make_plan import Planned
from roundelay.planning.planning import plan_with_reasons

STEPS = 20


class GPT(nn.Module):
    """Two layers of causal attention over 20 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(32, 20)

    def forward(self, index: Tensor) -> Tensor:
        """Of (N, L) tokens: (N, L, 20) scores."""
        mask = nn.Transformer.generate_square_subsequent_mask(index.shape[1])
        x = self.embedding(index)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        out: Tensor = self.last(x)
        return out


def contrastive(outputs: Tensor, batch: Any) -> Tensor:
    """Each row against all others of the batch."""
    normed = F.normalize(outputs, dim=1)
    return F.cross_entropy(normed @ normed.roll(1, 0).T / 0.2, torch.arange(len(outputs)))


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Of all targets of the batch."""
    return F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def normed() -> nn.Module:
    """With BatchNorm over the rows."""
    first = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def perceptron() -> nn.Module:
    """Without."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


Case = tuple[Callable[[], nn.Module], Callable[[Tensor, Any], Tensor], Callable[[], Any]]
CASES: dict[str, Case] = {
    "BatchNorm": (normed, entropy, lambda: (torch.randn(16, 8), torch.randint(4, (16,)))),
    "contrastive": (perceptron, contrastive, lambda: (torch.randn(16, 8), torch.zeros(16))),
    "a plain GPT": (GPT, entropy, lambda: (torch.randint(20, (16, 12)), torch.randint(20, (16, 12)))),
    "a perceptron": (perceptron, entropy, lambda: (torch.randn(16, 8), torch.randint(4, (16,)))),
}


def job(name: str) -> Job:
    """Of a case, always the same."""
    model, loss, batch = CASES[name]
    torch.manual_seed(0)
    data = [batch() for _ in range(STEPS)]
    return Job(
        model=model(),
        loss=loss,
        batches=lambda epoch: data,
        optimizer=lambda n: torch.optim.SGD(n, lr=0.05, momentum=0.9),
    )


def plain(name: str) -> list[float]:
    """Losses of the loop that everybody writes."""
    made, losses = job(name), []
    made.model.train()
    optimizer = made.optimizer(list(made.model.named_parameters()))
    for batch in made.batches(0):
        optimizer.zero_grad()
        loss = made.loss(made.model(batch[0]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_without_options_a_job_ends_with_the_losses_of_plain_pytorch(name: str) -> None:
    trained = roundelay.train(job(name))
    assert trained.plan.rule == "1f1b"
    assert [update.loss for update in trained.updates] == pytest.approx(plain(name), rel=1e-5)


@pytest.mark.parametrize(("name", "parts"), [("BatchNorm", 1), ("contrastive", 1), ("a perceptron", 4)])
def test_two_workers_train_the_same(name: str, parts: int) -> None:
    trained = roundelay.train(job(name), workers=2)
    assert trained.plan.micro_batches == parts
    assert [update.loss for update in trained.updates] == pytest.approx(plain(name), rel=1e-5)


def test_a_replica_has_one_part_and_batch_norm_its_rows_as_in_ddp() -> None:
    plan = roundelay.plan(job("BatchNorm"), data_parallel=2)
    assert (plan.num_workers, plan.num_stages, plan.batch_parts) == (2, 1, 2)
    assert plan.arrangement == "2 replicas"


@pytest.mark.parametrize(("slower", "workers"), [(1, 2), (2, 1)])
def test_the_plan_one_or_two_workers_one_worker_and_two_is_taken_and_the_line_says_why(
    slower: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {slower: 0.2, 3 - slower: 0.1}
    monkeypatch.setattr("roundelay.planning.default_workers.batch_s", lambda plan: seconds[plan.num_workers])
    monkeypatch.setenv("ROUNDELAY_CORES", "8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = plan_with_reasons(job("a perceptron"), Choices())
    assert found.plan.num_workers == workers
    texts = {1: "1 worker of 8 threads", 2: "2 workers of 4 threads each"}
    line = f"{texts[workers]}: 100 ms a batch, by a measurement here; {texts[slower]}: 200 ms a batch"
    assert found.notices == (line,)
    assert line in found.reasons


def test_whole_batches_are_computed_by_one_worker_and_two_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Plan] = []
    own = making.measured_plan

    def counted(wish: Any, draft: Any) -> Planned:
        measured.append(draft.plan)
        return own(wish, draft)

    monkeypatch.setattr(making, "measured_plan", counted)
    found = plan_with_reasons(job("BatchNorm"), Choices())
    assert [plan.num_workers for plan in measured] == [1]
    assert "--micro-batches 4 takes them over parts" in found.notices[0]
    assert found.notices[1].endswith(": several would compute whole batches in turns")


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"rule": "1f1b", "workers": 2}, ""),
        ({"rule": "zb-h1", "workers": 2}, ""),
        ({"rule": "pipeoptim", "workers": 1}, ""),
        (
            {"rule": "pipeoptim", "workers": 2},
            "rule pipeoptim reads weights up to 1 update old, and predicts newer ones",
        ),
        ({"rule": "async", "workers": 3}, "rule async reads weights up to 2 updates old"),
        ({"rule": "async", "workers": 3, "micro_batches": 2}, "rule async reads weights up to 1 update old"),
        ({"layout": "dp"}, "rule cdp-v2 reads weights up to 1 update old"),
    ],
)
def test_a_rule_that_reads_older_weights_says_so(choices: dict[str, Any], told: str) -> None:
    plan = roundelay.plan(job("a perceptron"), **choices)
    assert staleness(plan).startswith(told)
    assert bool(staleness(plan)) == bool(told)
    assert (staleness(plan) in plan_notices(plan)) == bool(told)


def test_threads_that_do_not_fit_this_host_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    plan = roundelay.plan(job("a perceptron"), workers=2, threads=4)
    assert cores_notice(plan, range(2)) == "the plan uses 8 of 16 cores here; a new plan, or --threads, uses more"
    monkeypatch.setenv("ROUNDELAY_CORES", "9")
    assert cores_notice(plan, range(2)) == ""
    monkeypatch.setenv("ROUNDELAY_CORES", "6")
    assert cores_notice(plan, range(2)) == "the plan has 8 threads on 6 cores here, where they wait for one another"


def test_an_arrangement_names_replicas_stages_mesh_and_split_states() -> None:
    made = job("a perceptron")
    assert roundelay.plan(made, workers=2).arrangement == "2 workers"
    both = roundelay.plan(made, workers=1, data_parallel=2, tensor_parallel=2, zero=1)
    assert both.arrangement == "2 replicas x tensor 2 x ZeRO 1"
    assert roundelay.plan(made, workers=2, data_parallel=2).arrangement == "2 replicas x 2 stages"
