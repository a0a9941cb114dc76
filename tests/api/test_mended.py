"""What a reader with fresh eyes found broken once: each stays mended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import roundelay
from roundelay.errors import PlanError, UsageError
from roundelay.planning.planning import capture, plan
from roundelay.proof.run_vs_reference import verify_session
from roundelay.session.training import Length, Session

ROWS = 24


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(12, 12), torch.nn.Linear(12, 3)
    )


def mean(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs, batch[1])


def job(batches: Callable[[int], Any] | None = None, **more: Any) -> roundelay.Job:
    listed = [data()[i : i + 6] for i in range(0, ROWS, 6)]
    fields: dict[str, Any] = {"loss": mean, "optimizer": partial(torch.optim.AdamW, lr=1e-2)} | more
    return roundelay.Job(model=model(), batches=batches or (lambda epoch: listed), **fields)


def verified(given: roundelay.Job, length: Length | None = None, tamper: str | None = None, **choices: Any) -> Any:
    captured = capture(given)
    chosen = plan(given, captured=captured, workers=2, **choices)
    return verify_session(Session(given, captured, chosen, 0, length or Length(steps=6)), tamper)


def test_a_loader_with_a_generator_of_its_own_gives_both_runs_the_same_data() -> None:
    loader = DataLoader(data(), 6, shuffle=True, generator=torch.Generator().manual_seed(7))
    result = verified(job(lambda epoch: loader))
    assert result.equal, result.difference


def test_a_loader_that_fills_its_own_tensors_again_trains_on_what_it_gave() -> None:
    listed = [data()[i : i + 6] for i in range(0, ROWS, 6)]

    def refilled(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = torch.empty(6, 6), torch.empty(6, dtype=torch.int64)
        for batch in listed:
            x.copy_(batch[0])
            y.copy_(batch[1])
            yield x, y

    losses = []
    for batches in (refilled, lambda epoch: listed):
        given = job(batches)
        trained = roundelay.train(given, plan=roundelay.plan(given, workers=2), epochs=1)
        losses.append([update.loss for update in trained.updates])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("backward", ["stash", "recompute"])
def test_a_loss_that_draws_random_numbers_is_keyed_like_the_model(backward: str) -> None:
    def noisy(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(outputs + 0.1 * torch.rand_like(outputs), batch[1])

    result = verified(job(loss=noisy), backward=backward)
    assert result.equal, result.difference


def test_a_step_that_writes_into_gradients_leaves_the_prediction_the_ones_it_was_given() -> None:
    nesterov = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    result = verified(job(optimizer=nesterov), rule="pipeoptim", predictor="released-code", micro_batches=2)
    assert result.equal, result.difference


@pytest.mark.parametrize("way", ["stash", "s", "order", "drop-update"])
def test_tampering_that_changes_nothing_is_refused_and_never_called_equal(way: str) -> None:
    one = [data()[:6]]
    with pytest.raises(UsageError, match=r"changed no bit|changes nothing"):
        verified(job(lambda epoch: one), Length(epochs=1), tamper=way)


def test_a_checkpoint_goes_on_with_its_own_seed_only(tmp_path: Any) -> None:
    given = job()
    roundelay.train(given, seed=5, steps=2, save_to=tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="Give --seed 5"):
        roundelay.train(given, seed=0, steps=2, resume=tmp_path / "checkpoint")


def test_the_steps_of_a_continued_run_are_its_own(tmp_path: Any) -> None:
    given = job()
    roundelay.train(given, steps=3, save_to=tmp_path / "checkpoint")
    result = roundelay.verify(given, steps=4, resume=tmp_path / "checkpoint")
    assert (result.equal, result.steps, result.losses) == (True, 4, 4)


def test_tampering_with_a_continued_run_is_noticed(tmp_path: Any) -> None:
    given = job()
    roundelay.train(given, workers=2, rule="pipeoptim", steps=3, save_to=tmp_path / "checkpoint")
    choices: dict[str, Any] = {"workers": 2, "rule": "pipeoptim", "resume": tmp_path / "checkpoint"}
    result = roundelay.verify(given, steps=4, tamper="drop-update", **choices)
    assert (result.equal, result.stage) == (False, 1)


def test_a_rule_that_stashes_has_no_other_mode() -> None:
    with pytest.raises(PlanError, match="only the mode stash"):
        roundelay.register_rule(
            roundelay.UpdateRule(
                name="odd", schedule="async-1f1b", predicts=False, stashes=True, modes=("recompute",), source="a test"
            )
        )


def test_parts_in_eval_mode_stay_there() -> None:
    given = job(evaluate=lambda module: {"training": float(any(part.training for part in module.modules()))})
    given.model[2].eval()
    trained = roundelay.train(given, steps=2)
    assert trained.evaluations[-1].metrics == {"training": 0.0}
    assert (given.model.training, given.model[2].training) == (True, False)
