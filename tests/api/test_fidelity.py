"""The captured job is held to the person's own program in plain PyTorch; every break of the product is seen."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader

import roundelay
from roundelay.errors import FidelityError, RunError, UsageError
from roundelay.frontend.loss import LossCall
from roundelay.frontend.stage_builder import StageBuilder
from roundelay.frontend.stages.segment import Segment
from roundelay.job import Job, Named
from roundelay.proof import fidelity, fidelity_children, fidelity_precheck
from roundelay.proof.fidelity import Fidelity, compare_with_plain
from roundelay.proof.fidelity_differences import DifferenceChecker, FidelityDifference
from roundelay.proof.fidelity_in_process import move
from roundelay.proof.fidelity_precheck import check_before_training
from roundelay.proof.shared_memory_tensors import SharedTensors
from roundelay.runtime import optimizer_steps as stages
from roundelay.runtime.loading.loader_probe import first_batches
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session
from tests.api import jobs

Batch = tuple[Tensor, Tensor]
LIMIT_S = 60.0


def data(rows: int = 8, count: int = 4) -> list[Batch]:
    """Batches of six numbers and one of three classes."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        made.append((torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)))
    return made


def sequences(count: int = 4) -> list[Batch]:
    """Batches of eight sequences of five times six numbers."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for _ in range(count):
        made.append((torch.randn(8, 5, 6, generator=generator), torch.randint(3, (8,), generator=generator)))
    return made


def layers(*more: nn.Module) -> nn.Module:
    """A few linear layers, with something between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), *more, nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 3))


class Recurrent(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(6, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Of the last time."""
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


class Attentive(nn.Module):
    """An encoder layer, dropout and attention with dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Of the mean over times."""
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


def job(model: nn.Module, rows: list[Batch] | None = None, **changes: Any) -> Job:
    """A job on the same batches in every epoch."""
    given = data() if rows is None else rows
    fields = {"loss": jobs.loss, "batches": lambda epoch: given, "optimizer": partial(Adam, lr=1e-2)}
    return Job(model=model, **(fields | changes))  # type: ignore[arg-type]


def summed(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Sum, and how many were summed."""
    wanted = batch[1] > 0
    return functional.cross_entropy(outputs[wanted], batch[1][wanted], reduction="sum"), wanted.sum()


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    """Rates and momenta that change with every update."""
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


def found(one: Job, *, count: int = 3, evaluates: bool = False, limit_s: float = LIMIT_S, **choices: Any) -> Fidelity:
    """What the comparison says of a job, by a plan of two stages under ``1f1b`` with M = 1 unless choices differ."""
    captured = roundelay.capture(one)
    plan = roundelay.plan(one, captured=captured, **({"workers": 2, "rule": "1f1b", "micro_batches": 1} | choices))
    batches = [(batch, 0) for batch in first_batches(one.batches, 0, count)]
    return compare_with_plain(one, captured, plan, 0, batches, evaluates=evaluates, limit_s=limit_s)


ORDINARY: dict[str, tuple[Callable[[], Job], dict[str, Any]]] = {
    "adam": (lambda: job(layers()), {}),
    "sgd": (lambda: job(layers(), optimizer=partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)), {}),
    "one cycle": (lambda: job(layers(), scheduler=one_cycle), {}),
    "dropout": (lambda: job(layers(nn.Dropout(0.5), nn.AlphaDropout(0.2))), {}),
    "batch norm": (lambda: job(layers(nn.BatchNorm1d(12))), {}),
    "encoder": (lambda: job(Attentive(), sequences()), {}),
    "lstm": (lambda: job(Recurrent(), sequences()), {}),
    "tied": (lambda: jobs.make(jobs.Tied(), batches=jobs.tokens), {}),
    "groups, noisy data": (jobs.make, {}),
    "sum and count": (lambda: job(layers(), loss=summed), {}),
    "bf16": (lambda: job(layers(nn.Dropout(0.5))), {"precision": "bf16"}),
    "fp16": (lambda: job(layers()), {"precision": "fp16"}),
    "recompute": (lambda: job(layers(nn.Dropout(0.5))), {"rule": "pipeoptim", "backward": "recompute"}),
    "some run again": (lambda: job(layers(nn.Dropout(0.5))), {"recompute": "all"}),
    "mixed": (lambda: job(layers(nn.Dropout(0.5))), {"rule": "async", "backward": "mixed"}),
    "halves": (lambda: job(layers(nn.Dropout(0.5))), {"rule": "zb-h1"}),
    "average": (lambda: job(layers()), {"ema": 0.9}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_job_trains_as_plain_pytorch_does_to_the_last_bit(name: str) -> None:
    make, choices = ORDINARY[name]
    result = found(make(), **choices)
    assert result.equal, result.difference
    assert result.exact, str(result)
    assert not result.unchecked
    assert result.updates == 3
    assert result.tensors > 3 * result.gradients > 0


@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("name", ["adam", "batch norm", "encoder", "sum and count", "fp16"])
def test_plain_pytorch_that_accumulates_the_same_parts_does_so_too(name: str, micro_batches: int) -> None:
    make, choices = ORDINARY[name]
    result = found(make(), **choices, micro_batches=micro_batches)
    assert result.equal, result.difference
    assert result.updates == 3


@pytest.mark.parametrize("clip", ["global:0.01", "stage:0.01"])
def test_gradients_are_clipped_as_torch_clips_them_or_it_is_said_that_nothing_does(clip: str) -> None:
    result = found(job(layers()), clip=clip)
    assert result.equal, result.difference
    assert ("no counterpart" in str(result)) == (clip != "global:0.01")


class Pruned(nn.Module):
    """Draws what nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape that the layers make."""
        torch.rand_like(x)
        out: Tensor = self.body(x)
        return out


def test_draws_that_the_graph_has_not_shift_no_other_number() -> None:
    result = found(job(Pruned()))
    assert result.equal, result.difference
    assert "numbers that nothing reads" in str(result)


class Turned(nn.Module):
    """Drops where a tensor does not lie in the order of its indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 3."""
        out: Tensor = self.last(functional.dropout(self.first(x).t(), 0.5).t())
        return out


def test_a_cut_before_a_draw_over_a_turned_tensor_is_no_difference() -> None:
    one = job(Turned())
    turned = next(op.name for op in roundelay.capture(one).graph.ops if "aten.t" in op.target or "numpy_T" in op.target)
    result = found(one, cuts=turned)
    assert result.equal, result.difference
    assert "compared without cuts" in str(result)


# ----------------------------------------------------------------------------------------- breaks in the product


def buffer_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward writes into buffers is lost."""
    real = Segment._run
    monkeypatch.setattr(Segment, "_run", lambda s, leaves, buffers, *rest: real(s, leaves, dict(buffers), *rest))


def parameter_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained parameter is taken for one that is not."""
    real = StageBuilder._segment

    def without(builder: StageBuilder, *args: Any, **options: Any) -> Segment:
        segment = real(builder, *args, **options)
        return replace(segment, trainable=segment.trainable - {"0.weight"})

    monkeypatch.setattr(StageBuilder, "_segment", without)


def loss_term_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is a constant less."""
    real = LossCall.__call__

    def less(call: LossCall, *values: Any) -> list[Tensor]:
        loss, *others = real(call, *values)
        return [loss - 0.01 * values[0].square().mean(), *others]

    monkeypatch.setattr(LossCall, "__call__", less)


def rate_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage's optimizer has another learning rate."""
    real = stages.build_optimizer

    def slower(*given: Any) -> Optimizer:
        made = real(*given)
        made.param_groups[1]["lr"] *= 0.5
        return made

    monkeypatch.setattr(stages, "build_optimizer", slower)
    monkeypatch.setattr(stages, "build_scheduler", lambda *_: None)


def group_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage trains nothing of its second group."""
    real = stages.narrow

    def dropping(optimizer: Optimizer, *given: Any) -> None:
        real(optimizer, *given)
        optimizer.param_groups[1]["params"] = []

    monkeypatch.setattr(stages, "narrow", dropping)


BREAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "a buffer's update dropped": (buffer_dropped, "buffer", "buffer '1.running_mean' in update 0"),
    "a parameter frozen": (parameter_frozen, "backward", "parameter '0.weight' in update 0"),
    "a term of the loss lost": (loss_term_lost, "forward", "the loss in update 0"),
    "a learning rate wrong": (rate_wrong, "optimizer", "the learning rate of group 1 in update 0"),
    "a group dropped": (group_dropped, "optimizer", "bias' after update 0"),
}


def groups(named: Named) -> Optimizer:
    """Biases apart."""
    biases = [p for n, p in named if n.endswith("bias")]
    return AdamW([{"params": [p for n, p in named if not n.endswith("bias")]}, {"params": biases, "lr": 1e-3}], lr=1e-2)


def broken() -> Job:
    """A job in which each of the breaks makes a difference."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3))
    return job(model, optimizer=groups)


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_of_the_product_is_seen_and_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    harm, kind, subject = BREAKS[name]
    one = broken()
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    harm(monkeypatch)
    verified = roundelay.verify(one, plan=plan, steps=3)
    assert not verified.equal
    assert verified.fidelity is not None
    assert (verified.fidelity.kind, subject in verified.fidelity.difference) == (kind, True), verified.fidelity
    assert verified.fidelity.difference in repr(verified)
    if name not in ("a learning rate wrong", "a group dropped"):  # those alone the reference knows
        assert not verified.difference
    with pytest.raises(FidelityError, match="compared with plain PyTorch") as refused:
        roundelay.train(one, plan=plan, steps=3)
    assert subject in refused.value.got
    assert refused.value.exit_code == 2
    assert not roundelay.train(one, plan=plan, steps=3, check="off").check


def test_what_is_unbroken_is_verified_in_both_links() -> None:
    verified = roundelay.verify(broken(), workers=2, rule="1f1b", micro_batches=1, steps=3)
    assert verified.equal
    assert str(verified.fidelity) == "captured = plain PyTorch (3 updates, 8 gradients, weights, buffers: bit-equal)"


def test_an_average_that_moves_apart_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.runtime.optimizer.weight_averages.WeightAverages.update", lambda _: None)
    result = found(job(layers()), ema=0.9)
    assert (result.kind, "moving average" in result.difference) == ("optimizer", True)


# ---------------------------------------------------------------------------------------------- what is compared


def checker() -> DifferenceChecker:
    """One that has compared nothing."""
    one = job(layers())
    captured = roundelay.capture(one)
    return DifferenceChecker(captured.graph, roundelay.plan(one, captured=captured, workers=1))


def test_gradients_are_measured_by_their_layers_and_none_may_stand_for_zeros() -> None:
    check = checker()
    weight, nothing = torch.full((4, 4), 2.0), torch.tensor([1e-9])
    assert check.gradients(0, {"0.weight": weight, "0.bias": nothing}, {"0.weight": weight, "0.bias": -nothing}) == [
        "0.bias"
    ]
    assert not check.exact
    assert check.operator == "aten.linear.default of 0"
    assert check.gradients(0, {}, {"0.weight": torch.zeros(4)}) == []
    with pytest.raises(FidelityDifference, match=r"'0.bias'.*the captured job none") as told:
        check.gradients(0, {}, {"0.bias": torch.ones(4)})
    assert told.value.kind == "backward"
    with pytest.raises(FidelityDifference, match="plain PyTorch none"):
        check.gradients(0, {"0.bias": torch.ones(4)}, {})
    with pytest.raises(FidelityDifference, match="differs by"):
        check.gradients(0, {"0.weight": weight * 1.001}, {"0.weight": weight})


def test_numbers_that_are_none_are_the_same() -> None:
    nan = float("nan")
    check = checker()
    check.metrics(0, {"a": [nan]}, {"a": [nan]})
    check.gradients(0, {"0.bias": torch.tensor([nan, 1.0])}, {"0.bias": torch.tensor([nan, 1.0])})
    assert check.exact
    with pytest.raises(FidelityDifference, match="the metric 'a'"):
        check.metrics(0, {"a": [1.0]}, {"a": [nan]})


def test_tensors_of_every_kind_are_left_and_taken() -> None:
    kinds = {
        "turned": torch.randn(3, 4).t(),
        "low": torch.randn(5).bfloat16(),
        "true": torch.tensor([True, False]),
        "two": torch.randn(2, dtype=torch.complex64),
        "nothing": torch.empty(0, 3),
        "number": torch.tensor(7),
        "sparse": torch.eye(3).to_sparse(),
    }
    room = SharedTensors(1000, len(kinds))
    taken = room.get_all(room.put_all(kinds))
    assert all(torch.equal(taken[name], kind.to_dense() if name == "sparse" else kind) for name, kind in kinds.items())
    with pytest.raises(RunError, match="more than"):
        room.put_all({"large": torch.zeros(10_000)})


class Merging(nn.Linear):
    """Merges its addition into its weight for evaluations, as LoRA's layers do."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.weight.requires_grad_(False)
        self.more, self.merged = nn.Parameter(torch.ones(3, 6)), False

    def train(self, mode: bool = True) -> Merging:
        """Merged in eval mode only."""
        super().train(mode)
        if mode == self.merged:
            self.weight.data += self.more.data * (-1 if self.merged else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """With the addition, however it is held."""
        plain = functional.linear(x, self.weight, self.bias)
        return plain if self.merged else plain + functional.linear(x, self.more)


def said(model: nn.Module) -> dict[str, float]:
    """The loss on the first batch."""
    return {"loss": float(jobs.loss(model(data()[0][0]), data()[0]))}


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_what_evaluate_says_is_compared(transport: str) -> None:
    torch.manual_seed(0)
    one = job(nn.Sequential(nn.Linear(6, 6), Merging()), evaluate=said, optimizer=trained_only)
    result = found(one, evaluates=True, transport=transport)
    assert result.equal, result.difference
    assert "evaluate" in result.parts


def trained_only(named: Named) -> Optimizer:
    """Without what is frozen."""
    return SGD([p for _, p in named if p.requires_grad], lr=0.1)


def test_evaluations_merge_and_take_out_as_often_as_there_are_any() -> None:
    torch.manual_seed(0)
    one = job(nn.Sequential(nn.Linear(6, 6), Merging()), evaluate=said, optimizer=trained_only)
    trained = roundelay.train(one, workers=2, rule="1f1b", micro_batches=1, epochs=3)
    fresh = nn.Sequential(nn.Linear(6, 6), Merging())
    fresh.load_state_dict(one.model.state_dict())
    with torch.no_grad():
        held = said(fresh)["loss"]
    assert trained.evaluations[-1].metrics["loss"] == pytest.approx(held, rel=1e-5)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_an_average_by_a_hook_of_the_step_is_named_by_verify(transport: str) -> None:
    average: dict[str, Tensor] = {}

    def hooked(named: Named) -> Optimizer:
        made = SGD(named, lr=0.1)

        def hook(*_: Any) -> None:
            for name, parameter in named:
                average.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)

        made.register_step_post_hook(hook)
        return made

    one = job(layers(), optimizer=hooked, evaluate=lambda _: {n: float(a.sum()) for n, a in average.items()})
    result = found(one, evaluates=True, transport=transport)
    assert not result.equal
    assert (result.kind, "of evaluate" in result.difference) == ("evaluate", True)
    assert not average


def test_verify_looks_at_a_second_epoch_where_the_run_has_one() -> None:
    asked: list[int] = []

    def batches(epoch: int) -> Iterator[Batch]:
        asked.append(epoch)
        yield from (data(8 if epoch == 0 else 6)[:2])

    one = job(layers(), batches=batches)
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    verified = roundelay.verify(one, plan=plan, epochs=2)
    assert verified.equal
    assert verified.fidelity is not None
    assert verified.fidelity.updates == 3
    asked.clear()
    assert roundelay.verify(one, plan=plan, epochs=1).fidelity.updates == 2  # type: ignore[union-attr]
    assert 1 not in asked


def test_a_checkpoints_run_is_held_to_the_models_own_start(tmp_path: Path) -> None:
    def one() -> Job:
        return job(layers())

    plan = roundelay.plan(one(), workers=2, rule="1f1b", micro_batches=1)
    told = roundelay.train(one(), plan=plan, steps=2, save_to=tmp_path / "kept")
    assert told.check.startswith("check full: captured = plain PyTorch (2 updates")
    verified = roundelay.verify(one(), plan=plan, steps=2, resume=tmp_path / "kept")
    assert verified.equal
    assert "from the model's own start" in str(verified.fidelity)
    resumed = roundelay.train(one(), plan=plan, steps=2, resume=tmp_path / "kept", check="full")
    assert resumed.check == "check quick: what capture checks (the run resumes from a checkpoint)"


# --------------------------------------------------------------------------------------- children and their ends


def test_a_side_that_hangs_or_is_killed_is_told_in_words() -> None:
    one = job(layers(), loss=lambda outputs, batch: jobs.loss(outputs, batch))
    captured = roundelay.capture(one)
    plan = roundelay.plan(one, captured=captured, workers=2, rule="1f1b", micro_batches=1)
    batches = [(batch, 0) for batch in data()]
    parent = os.getpid()

    def ending(how: Callable[[], Any]) -> Job:
        def optimizer(named: Named) -> Optimizer:
            if os.getpid() != parent:
                how()
            return Adam(named)

        return replace(one, optimizer=optimizer)

    began = time.monotonic()
    with pytest.raises(RunError, match=r"the training in plain PyTorch: got no answer for 0\.5 s"):
        compare_with_plain(ending(lambda: time.sleep(60)), captured, plan, 0, batches, limit_s=0.5)
    assert time.monotonic() - began < 20
    killed = ending(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RunError, match="was killed by SIGKILL"):
        compare_with_plain(killed, captured, plan, 0, batches, limit_s=LIMIT_S)
    failing = compare_with_plain(ending(lambda: 1 / 0), captured, plan, 0, batches, limit_s=LIMIT_S)
    assert "ZeroDivisionError" in failing.unchecked


def test_the_captured_side_that_fails_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_children, "CapturedStepper", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in found(job(layers())).unchecked


def test_a_loader_with_processes_is_not_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    one = jobs.make(batches=lambda epoch: DataLoader(jobs.Noisy(), 8, num_workers=1))
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    captured = roundelay.capture(one)
    monkeypatch.setattr(fidelity_precheck, "first_batches", lambda *_: pytest.fail("read again"))
    told = check_before_training(Session(one, captured, plan, 0, Length(steps=3)), None)
    assert told == "check full: captured = plain PyTorch (2 updates, 10 gradients, weights, buffers: bit-equal)"


def test_a_loader_that_fails_at_once_leaves_nothing_to_compare() -> None:
    one = job(layers())
    captured = roundelay.capture(one)
    plan = roundelay.plan(one, captured=captured, workers=2, rule="1f1b", micro_batches=1)
    assert "no batch" in compare_with_plain(one, captured, plan, 0, [], limit_s=1.0).unchecked


@pytest.mark.parametrize("check", ["full", None])
def test_training_starts_as_if_nobody_had_looked(check: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def counting(outputs: Tensor, batch: Batch) -> Tensor:
        calls.append(1)
        sys.stdout.write("called\n")
        return jobs.loss(outputs, batch)

    def run(asked: str | None) -> tuple[dict[str, Tensor], int, str]:
        one = jobs.make(loss=counting)
        plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
        calls.clear()
        capfd.readouterr()
        torch.manual_seed(5)
        told = roundelay.train(one, plan=plan, steps=5, check=asked).check
        drawn = torch.rand(3)
        return {**one.model.state_dict(), "drawn": drawn}, len(calls), told + capfd.readouterr().out

    looked, calls_then, said_then = run(check)
    plain, calls_else, said_else = run("off")
    assert said_then.startswith("check full: captured = plain PyTorch")
    assert said_then.count("called") == said_else.count("called")
    assert calls_then == calls_else
    assert all(torch.equal(looked[name], tensor) for name, tensor in plain.items())


# ------------------------------------------------------------------------------------------- which check is made


def test_a_check_that_costs_much_is_left_to_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = job(layers())
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    slow = replace(plan, stages=tuple(replace(stage, forward_s=2.0) for stage in plan.stages))
    chosen = partial(fidelity_precheck.choose_check, one, resumed=False)
    assert chosen(plan, None).which == "full"
    assert chosen(slow, None).which == "quick"
    assert "16 s" in chosen(slow, None).why
    assert chosen(slow, "full").which == "full"
    assert chosen(replace(plan, compile=True), None).which == "quick"
    elsewhere = replace(plan, workers=tuple(replace(worker, device="cuda:0") for worker in plan.workers))
    assert chosen(elsewhere, "full").which == "full"
    assert (
        "file" in fidelity_precheck.choose_check(replace(one, weights="a.safetensors"), plan, "full", resumed=False).why
    )
    assert "launcher" in chosen(plan, "full", launched=True).why
    assert chosen(plan, "off").which == "off"
    monkeypatch.setattr(fidelity_precheck, "COPIES", 10**12)
    assert "memory" in chosen(plan, None).why


def test_quick_and_off_ask_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "isolated", lambda *_, **__: pytest.fail("a child"))
    one = job(layers())
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    assert roundelay.train(one, plan=plan, steps=1, check="quick").check == "check quick: what capture checks"
    assert roundelay.train(one, plan=plan, steps=1, check="off").check == ""


def test_a_check_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="'some'; expected one of full, quick, off"):
        roundelay.train(job(layers()), steps=1, check="some")


def test_the_check_looks_at_no_more_batches_than_the_run_makes_updates() -> None:
    one = job(layers())
    plan = roundelay.plan(one, workers=2, rule="1f1b", micro_batches=1)
    assert "(1 update, " in roundelay.train(one, plan=plan, steps=1).check


def test_where_nothing_can_be_forked_it_is_compared_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it stays: neither in the model nor in what the loss counts."""
    calls: list[int] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        calls.append(len(calls))
        return functional.cross_entropy(outputs, batch[1])

    one = job(Counting(), loss=loss)
    captured = roundelay.capture(one)
    plan = roundelay.plan(one, captured=captured, workers=2, rule="1f1b", micro_batches=1)
    tensors = [*one.model.parameters(), *one.model.buffers()]
    before = [(t, t.data_ptr(), t.detach().clone(), t.grad) for t in tensors]
    counted, state = list(calls), torch.random.get_rng_state()
    monkeypatch.setattr(fidelity, "isolated", None)
    monkeypatch.setattr(fidelity, "must_share_process", lambda: True)
    batches = [(batch, 0) for batch in list(one.batches(0))[:3]]
    result = compare_with_plain(one, captured, plan, 0, batches, limit_s=1.0)
    assert result.equal
    assert result.exact
    assert (result.updates, result.unchecked) == (3, "")
    for (tensor, address, value, grad), now in zip(
        before, [*one.model.parameters(), *one.model.buffers()], strict=True
    ):
        assert now is tensor
        assert (now.data_ptr(), now.grad) == (address, grad)
        assert torch.equal(now, value)
    assert calls == counted
    assert torch.equal(torch.random.get_rng_state(), state)


def test_there_a_difference_is_found_and_nothing_of_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer_dropped(monkeypatch)
    monkeypatch.setattr(fidelity, "must_share_process", lambda: True)
    one = job(Counting())
    with pytest.raises(FidelityError, match=r"buffer 'seen'"):
        roundelay.train(one, workers=2, rule="1f1b", micro_batches=1, steps=2)
    assert not any(buffer.any() for buffer in one.model.buffers())


def test_weights_that_share_memory_or_are_kept_elsewhere_move_together() -> None:
    """Views and buffers in lists are moved with what they are views of."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight.data = self.one.weight.data
            self.register_buffer("count", torch.zeros(2))
            self.kept = [self.count, self.one.weight.detach()[1:]]

    model = Model()
    addresses = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    move(job(model), torch.device("cpu"))
    assert not addresses & {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *model.kept)}
    assert model.two.weight.data_ptr() == model.one.weight.data_ptr()
    assert model.kept[0] is model.count
    assert model.kept[1].data_ptr() == model.one.weight[1:].data_ptr()


def test_a_buffer_that_differs_is_told_with_the_line_that_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer_dropped(monkeypatch)
    one = job(Counting())
    with pytest.raises(FidelityError, match=r"buffer 'seen'.*does not change it.*test_fidelity.py:\d+ `self.seen.add_"):
        roundelay.train(one, workers=2, rule="1f1b", micro_batches=1, steps=2)


class Counting(nn.Module):
    """Counts its rows in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 3."""
        self.seen.add_(x.size(0))
        out: Tensor = self.body(x)
        return out


def test_a_session_says_how_it_was_checked() -> None:
    one = job(layers())
    captured = roundelay.capture(one)
    plan = roundelay.plan(one, captured=captured, workers=2, rule="1f1b", micro_batches=2)
    session = Session(one, captured, plan, 0, Length(steps=2))
    assert check_before_training(session, None).startswith(
        "check full: captured = plain PyTorch (2 updates, 6 gradients, weights"
    )
