"""Recurrent layers as one operation of any length: what is captured, its bits, its layout, whose weights it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from roundelay.errors import CaptureError, JobError
from roundelay.frontend import Captured, capture
from roundelay.frontend.export.recurrent import StandingIn
from tests.frontend.cutting import buffers_of, cut_after, differing, even_cuts, forwards, run, weights_of

Batch = tuple[Tensor, ...]
ROWS, LENGTH, FEATURES, WIDTH, CLASSES = 4, 5, 6, 6, 3
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": lambda **options: nn.LSTM(FEATURES, WIDTH, **options),
    "projected": lambda **options: nn.LSTM(FEATURES, WIDTH, proj_size=2, **options),
    "gru": lambda **options: nn.GRU(FEATURES, WIDTH, **options),
    "tanh": lambda **options: nn.RNN(FEATURES, WIDTH, **options),
    "relu": lambda **options: nn.RNN(FEATURES, WIDTH, nonlinearity="relu", **options),
}
OPTIONS = {
    "one way": {"batch_first": True},
    "both ways": {"batch_first": True, "bidirectional": True},
    "two layers, steps first": {"num_layers": 2},
    "two layers both ways without bias": {"batch_first": True, "num_layers": 2, "bidirectional": True, "bias": False},
}
FORMS = list(product(KINDS, OPTIONS))
BY_KIND = pytest.mark.parametrize("kind", KINDS)
# oneDNN has no LSTM with projections, and says so once
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


def lowered_lstm_fails() -> bool:
    """Whether this processor has no kernel for an LSTM that autocast lowers: then torch itself raises."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
    except RuntimeError:
        return True
    return False


NO_KERNEL = "torch itself cannot compute an LSTM of fp32 values in bf16 on this processor"


class Net(nn.Module):
    """A layer, a recurrent layer whose steps and states are both read, and a head."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.layer = nn.Linear(FEATURES, FEATURES), KINDS[kind](**options)
        self.head = nn.Linear((self.layer.proj_size or WIDTH) * (2 if self.layer.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor, start: Tensor | None = None, cell: Tensor | None = None) -> Tensor:
        """Return rows x length x classes, of rows x length x features and states of rows x layers x width."""
        x = self.enter(x)
        start, cell = (None if state is None else state.transpose(0, 1) for state in (start, cell))
        given = start if cell is None else (start, cell)
        steps, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1), given)
        steps = steps if self.layer.batch_first else steps.transpose(0, 1)
        ends = sum(state.mean() for state in (last if isinstance(last, tuple) else (last,)))
        out: Tensor = self.head(steps.contiguous().view(x.size(0), x.size(1), -1)) * (1 + ends)
        return out


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), batch[-1].flatten())


def batch_of(rows: int = ROWS, length: int = LENGTH, states: Sequence[tuple[int, int]] = ()) -> Batch:
    """Features, states of (how many, width), classes."""
    given = [torch.randn(rows, count, width) for count, width in states]
    return torch.randn(rows, length, FEATURES), *given, torch.randint(0, CLASSES, (rows, length))


def equals_eager(model: nn.Module, captured: Captured, batch: Batch, num_stages: int) -> bool:
    """Loss and gradients, bit for bit."""
    model.zero_grad()
    wanted = loss(model(*batch[:-1]), batch)
    wanted.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    done = run(captured, even_cuts(captured, num_stages), batch, weights_of(captured))
    return torch.equal(done.loss, wanted.detach()) and differing(done.grads, grads) == []


@pytest.mark.parametrize(("kind", "options"), FORMS)
def test_a_layer_captured_at_one_length_equals_eager_at_any(kind: str, options: str) -> None:
    model = Net(kind, **OPTIONS[options])
    captured = capture(model, loss, batch_of())
    assert sum(op.target.endswith((".input",)) for op in captured.graph.ops) == 1
    for rows, length in ((4, 5), (3, 9), (2, 2), (5, 40)):
        assert equals_eager(model, captured, batch_of(rows, length), 1), (rows, length)
        assert equals_eager(model, captured, batch_of(rows, length), 3), (rows, length)
    assert equals_eager(model, captured, batch_of(1, 7), 1)
    assert equals_eager(model, captured, batch_of(4, 1), 1)


@BY_KIND
def test_states_may_be_given(kind: str) -> None:
    model = Net(kind, batch_first=True, bidirectional=True)
    first = (2, model.layer.proj_size or WIDTH)
    states = [first, (2, WIDTH)] if isinstance(model.layer, nn.LSTM) else [first]
    captured = capture(model, loss, batch_of(states=states))
    for rows, length in ((4, 5), (3, 8), (1, 2)):
        assert equals_eager(model, captured, batch_of(rows, length, states), 1 if rows == 1 else 2)
    with pytest.raises(JobError, match="sizes"):
        captured.values(batch_of(4, 5, [(count + 2, width) for count, width in states]))


@BY_KIND
def test_capture_does_not_walk_through_the_steps(kind: str) -> None:
    short, long = (capture(Net(kind), loss, batch_of(length=length)) for length in (3, 1000))
    assert short.graph.fingerprint == long.graph.fingerprint


def test_a_first_batch_of_one_step_fixes_the_length_and_says_so() -> None:
    captured = capture(Net("gru"), loss, batch_of(length=1))
    with pytest.raises(JobError, match=r"expected sizes \('any', 1, 6\).*let a batch with more come first"):
        captured.values(batch_of(length=3))


@BY_KIND
def test_an_operation_counts_its_products(kind: str) -> None:
    model = Net(kind, batch_first=True)
    captured = capture(model, loss, batch_of())
    (op,) = (op for op in captured.graph.ops if op.target.endswith(".input"))
    matrices = sum(p.numel() for n, p in model.layer.named_parameters() if "weight" in n)
    assert op.flops == 2 * ROWS * LENGTH * matrices


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize(("kind", "options"), FORMS)
def test_a_stand_in_says_the_layout_that_the_operation_has(kind: str, options: str, lowered: bool) -> None:
    if lowered and kind == "lstm" and lowered_lstm_fails():
        pytest.skip(NO_KERNEL)
    layer = KINDS[kind](**OPTIONS[options])
    x = torch.randn(3, 4, FEATURES)
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        real = layer(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, StandingIn():
            told = layer(fake.from_tensor(x))
    assert layouts(told) == layouts(real)


def layouts(results: Any) -> list[Any]:
    """Of steps and states."""
    steps, last = results
    return [(t.shape, t.stride(), t.dtype) for t in (steps, *(last if isinstance(last, tuple) else (last,)))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@BY_KIND
def test_mixed_reads_the_weights_of_its_backward_alone(kind: str, precision: str) -> None:
    captured = capture(Net(kind, batch_first=True, num_layers=2), loss, batch_of()).lowering(precision)
    params, batch = weights_of(captured), batch_of(3, 8)
    cut = cut_after(
        captured, [next(i for i, op in enumerate(captured.graph.ops) if op.target == "aten.linear.default")]
    )
    zero = {n: torch.zeros_like(p) if n.startswith("layer") else p for n, p in params.items()}
    for later, moved in ((params, True), (zero, False)):
        done = run(captured, cut, batch, params, later=later, mode="mixed")
        (into,) = (grad for grad in done.leaving[1].values())
        assert bool(into.any()) == moved


@BY_KIND
def test_recompute_and_halves_have_the_bits_of_stash(kind: str) -> None:
    captured = capture(Net(kind, batch_first=True, num_layers=2), loss, batch_of())
    params, later, batch = weights_of(captured), weights_of(captured, 0.1), batch_of(3, 8)
    wanted = run(captured, even_cuts(captured, 2), batch, params)
    for options in ({"mode": "recompute"}, {"halved": True}, {"mode": "mixed"}, {"mode": "mixed", "halved": True}):
        done = run(captured, even_cuts(captured, 2), batch, params, **options)
        assert differing(done.grads, wanted.grads) == [], options
    whole, halved = (
        run(captured, even_cuts(captured, 2), batch, params, later=later, mode="mixed", halved=h) for h in (False, True)
    )
    assert differing(halved.grads, whole.grads) == []
    assert differing(whole.grads, wanted.grads) != []


class Inside(nn.Module):
    """Recurrent layers within blocks that export makes one operation each of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.still = nn.LSTM(FEATURES, WIDTH, batch_first=True), nn.GRU(FEATURES, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows x length x classes."""
        with torch.autocast("cpu", torch.bfloat16):
            steps, _ = self.low(x)
            steps = steps if steps.dtype is torch.float32 else steps.float() * 2
        with torch.no_grad():
            still, _ = self.still(x)
        out: Tensor = self.head(steps + still)
        return out


@pytest.mark.skipif(lowered_lstm_fails(), reason=NO_KERNEL)
def test_a_layer_under_the_models_own_autocast_or_without_gradients_keeps_both() -> None:
    model = Inside()
    captured = capture(model, loss, batch_of())
    for rows, length in ((4, 5), (3, 9)):
        batch = batch_of(rows, length)
        wanted = loss(model(batch[0]), batch)
        done = run(captured, cut_after(captured, []), batch, weights_of(captured))
        assert torch.equal(done.loss, wanted.detach())
        assert {n.split(".")[0] for n in done.grads} == {"low", "head"}


class Packed(nn.Module):
    """An LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(FEATURES, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return rows x classes."""
        out: Tensor = self.head(self.layer(pack_padded_sequence(x, lengths, batch_first=True))[1][0][-1])
        return out


def test_a_packed_sequence_is_refused() -> None:
    batch = (torch.randn(ROWS, LENGTH, FEATURES), torch.tensor([5, 4, 3, 3]), torch.randint(0, CLASSES, (ROWS,)))
    with pytest.raises(CaptureError, match=r"pack_padded_sequence.*mask the padding"):
        capture(Packed(), lambda outputs, batch: functional.cross_entropy(outputs, batch[-1]), batch)


@BY_KIND
def test_tapes_of_longer_sequences_hold_more(kind: str) -> None:
    captured = capture(Net(kind, batch_first=True), loss, batch_of())
    held = [
        forwards(captured, cut_after(captured, []), batch_of(length=length), weights_of(captured), {}, measure=True)
        for length in (5, 50)
    ]
    short, long = (one.tape.num_bytes for (one,) in held)
    assert 5 * short < long < 15 * short
    assert buffers_of(captured) == {}
