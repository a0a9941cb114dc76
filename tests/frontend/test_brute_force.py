"""The three backward modes against formulas written by hand, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.frontend import Captured, Mode, capture
from roundelay.ir.graph import LOSS
from tests.frontend.cutting import DRAW, Tensors, cut_after, forwards, run, weights_of

WIDTH = 6
DOUBLE = torch.float64


def squares(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(outputs, batch[1])


class Block(nn.Module):
    """Normalise, attend with one head, add, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x: rows x length x width."""
        h = self.norm(x)
        weights = (self.query(h) @ self.key(h).transpose(1, 2)).softmax(-1)
        out: Tensor = self.out(weights @ self.value(h) + x)
        return out


def mlp() -> nn.Module:
    """Three layers with two kinds of activation between them."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def linear(d: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias of a linear layer that kept ``x`` and reads ``w`` now."""
    return d @ w, d.flatten(0, -2).T @ x.flatten(0, -2), d.flatten(0, -2).sum(0)


def mlp_mixed(a: Tensors, b: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """Activations of ``a``, weights of ``b``."""
    first = x @ a["0.weight"].T + a["0.bias"]
    relu = first.clamp(min=0)
    second = relu @ a["2.weight"].T + a["2.bias"]
    tanh = second.tanh()
    out = tanh @ a["4.weight"].T + a["4.bias"]
    grads: Tensors = {}
    d = 2 * (out - y) / out.numel()
    d, grads["4.weight"], grads["4.bias"] = linear(d, tanh, b["4.weight"])
    d, grads["2.weight"], grads["2.bias"] = linear(d * (1 - tanh**2), relu, b["2.weight"])
    _, grads["0.weight"], grads["0.bias"] = linear(d * (first > 0), x, b["0.weight"])
    return grads


def block_mixed(a: Tensors, b: Tensors, x: Tensor, y: Tensor) -> Tensors:
    """Activations of ``a``, weights of ``b``."""

    def layer(name: str, given: Tensor) -> Tensor:
        return given @ a[f"{name}.weight"].T + a[f"{name}.bias"]

    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    h = plain * a["norm.weight"] + a["norm.bias"]
    q, k, v = layer("query", h), layer("key", h), layer("value", h)
    weights = (q @ k.transpose(1, 2)).softmax(-1)
    summed = weights @ v + x
    grads: Tensors = {}

    def back(name: str, d: Tensor, given: Tensor) -> Tensor:
        of_input, grads[f"{name}.weight"], grads[f"{name}.bias"] = linear(d, given, b[f"{name}.weight"])
        return of_input

    d = 2 * (layer("out", summed) - y) / y.numel()
    d = back("out", d, summed)
    of_weights = d @ v.transpose(1, 2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_h = back("value", weights.transpose(1, 2) @ d, h)
    of_h = of_h + back("query", of_scores @ k, h) + back("key", of_scores.transpose(1, 2) @ q, h)
    grads["norm.weight"] = (of_h * plain).flatten(0, -2).sum(0)
    grads["norm.bias"] = of_h.flatten(0, -2).sum(0)
    return grads


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensors], tuple[int, ...]]] = {
    "mlp": (mlp, mlp_mixed, (5, WIDTH)),
    "block": (Block, block_mixed, (3, 4, WIDTH)),
}


def batch_of(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x and y in double precision."""
    draws = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=draws, dtype=DOUBLE), torch.randn(shape, generator=draws, dtype=DOUBLE)


def captured_case(case: str) -> tuple[Captured, tuple[Tensor, Tensor]]:
    """The model in double precision and its data."""
    make, _, shape = CASES[case]
    return capture(make().to(DOUBLE), squares, batch_of(shape)), batch_of(shape)


def close(left: Tensors, right: Tensors) -> bool:
    """Equal up to rounding in double precision."""
    return left.keys() == right.keys() and all(torch.allclose(left[n], right[n], rtol=1e-9, atol=1e-12) for n in left)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_mixed_takes_activations_of_the_forward_and_weights_of_the_backward(case: str, num_stages: int) -> None:
    captured, batch = captured_case(case)
    old, new = weights_of(captured), weights_of(captured, 0.3)
    ends = captured.graph.cuts[:: max(1, len(captured.graph.cuts) // num_stages)][1:num_stages]
    cut = cut_after(captured, ends)
    by_hand = CASES[case][1]
    got = run(captured, cut, batch, old, later=new, mode="mixed").grads
    assert close(got, by_hand(old, new, *batch))
    assert not close(got, by_hand(new, new, *batch))
    assert not close(got, by_hand(old, old, *batch))
    assert close(run(captured, cut, batch, old, mode="mixed").grads, by_hand(old, old, *batch))


@pytest.mark.parametrize("case", CASES)
def test_mixed_reads_the_weights_as_they_are_when_backward_begins(case: str) -> None:
    captured, batch = captured_case(case)
    live, new = weights_of(captured), weights_of(captured, 0.3)
    wanted = CASES[case][1](live, new, *batch)
    made = forwards(captured, cut_after(captured, []), batch, live, {}, mode="mixed")
    for name, weight in live.items():
        weight.copy_(new[name])
    _, got = made[0].function.backward(made[0].tape, {LOSS: torch.ones((), dtype=DOUBLE)}, live)
    assert close(got, wanted)


@pytest.mark.parametrize("mode", ["stash", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_finite_differences(case: str, mode: Mode) -> None:
    captured, batch = captured_case(case)
    old, new = weights_of(captured), weights_of(captured, 0.3)
    cut = cut_after(captured, [captured.graph.cuts[2]])
    done = run(captured, cut, batch, old, later=new, mode=mode)
    last = done.forwards[-1]
    at = new if mode == "recompute" else old
    own = {n: at[n].clone() for n in last.params}

    def loss() -> float:
        return float(last.function.forward(own, {}, last.inputs, DRAW, mode="stash")[0][LOSS])

    step = 1e-5
    for name, weight in own.items():
        flat = weight.view(-1)
        for i in range(0, flat.numel(), 5):
            ends = []
            for sign in (1, -1):
                flat[i] += sign * step
                ends.append(loss())
                flat[i] -= sign * step
            assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(
                float(done.grads[name].view(-1)[i]), rel=1e-6, abs=1e-9
            )


@pytest.mark.parametrize("mode", ["stash", "recompute"])
def test_the_first_stages_gradients_equal_finite_differences_of_what_enters_its_backward(mode: Mode) -> None:
    captured, batch = captured_case("block")
    old, new = weights_of(captured), weights_of(captured, 0.3)
    done = run(captured, cut_after(captured, [captured.graph.cuts[4]]), batch, old, later=new, mode=mode)
    first, entering = done.forwards[0], done.entering[0]
    own = {n: (new if mode == "recompute" else old)[n].clone() for n in first.params}

    def weighted() -> float:
        made = first.function.forward(own, {}, first.inputs, DRAW, mode="stash")[0]
        return sum(float((made[n] * grad).sum()) for n, grad in entering.items() if grad is not None)

    assert own.keys() >= {"norm.weight", "query.weight"}
    step = 1e-5
    for name, weight in own.items():
        flat, ends = weight.view(-1), []
        for sign in (1, -1):
            flat[2] += sign * step
            ends.append(weighted())
            flat[2] -= sign * step
        slope = (ends[0] - ends[1]) / (2 * step)
        assert slope == pytest.approx(float(done.grads[name].view(-1)[2]), rel=1e-6, abs=1e-9)
