"""Capture: which sizes it leaves free, what it refuses and how it says so, and that it leaves the model alone."""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.errors import CaptureError, JobError
from roundelay.frontend import Captured, capture
from roundelay.frontend.batch import split
from roundelay.runtime.loading.loader_epoch import Generators
from tests.frontend.cutting import (
    captured_of,
    cut_after,
    differing,
    eager,
    even_cuts,
    modules_with_hooks,
    run,
    sample,
    weights_of,
)
from tests.zoo import ZOO, Batch, rows

VARYING = [name for name, entry in ZOO.items() if entry.varies]


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(outputs, batch["y"])


def only_x(batch: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (batch["x"],), {}


def pairs(rows_: int = 4, width: int = 6) -> dict[str, Tensor]:
    return {"x": torch.randn(rows_, width), "y": torch.randn(rows_, width)}


class Net(nn.Module):
    """Two layers; what happens between them is given."""

    def __init__(self, does: Callable[[Tensor], Tensor] = torch.relu, width: int = 6) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, width), Inner(does), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


class Inner(nn.Module):
    """Where the fault lies."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, h: Tensor) -> Tensor:
        """Whatever was given."""
        return self.does(h)


def equals_eager(name: str, captured: Captured, batch: Batch) -> bool:
    """Loss and gradients on this batch: bit for bit uncut, and up to rounding in two stages.

    With one row, strides of size-1 dimensions are ambiguous, and a boundary made contiguous may change the last bit.
    """
    params = weights_of(captured, 0.05)
    wanted = eager(ZOO[name], batch, params)
    whole, halves = (run(captured, even_cuts(captured, n), batch, params) for n in (1, 2))
    near = all(torch.allclose(halves.grads[n], wanted.grads[n], rtol=1e-6, atol=1e-9) for n in wanted.grads)
    return torch.equal(whole.loss, wanted.loss) and differing(whole.grads, wanted.grads) == [] and near


@pytest.mark.parametrize("name", VARYING)
def test_short_batches_and_varying_lengths_equal_eager(name: str) -> None:
    batches = ZOO[name].batches(3, 3, varying=True)
    for batch, few in zip(batches, (1, 6, 3), strict=True):
        assert equals_eager(name, captured_of(name), rows(batch, 0, few)), few


class Loop(nn.Module):
    """Steps over its input in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last state: rows x 6."""
        h = torch.zeros(x.size(0), 6)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return h


class Sized(nn.Module):
    """Takes another way for long inputs, and for many rows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.layer = dim, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows x 6."""
        out: Tensor = self.layer(x.mean(1))
        return out * 2 if x.size(self.dim) >= 4 else out


def series(rows_: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows_, length, 6), "y": torch.randn(rows_, 6)}


@pytest.mark.parametrize(
    ("make", "fits", "others", "got"),
    [
        (Loop, [(4, 5), (1, 5), (7, 5)], [(4, 4), (4, 6)], r"expected sizes \('any', 5, 6\)"),
        (lambda: Sized(1), [(4, 4), (1, 5), (3, 9)], [(4, 3)], r"got sizes \(4, 3, 6\): .*size\(\)\[1\] >= 4"),
        (lambda: Sized(0), [(4, 4), (5, 9)], [(3, 5)], r"got sizes \(3, 5, 6\): .*size\(\)\[0\] >= 4"),
    ],
)
def test_sizes_that_lead_the_models_python_another_way_are_refused(
    make: Callable[[], nn.Module], fits: list[tuple[int, int]], others: list[tuple[int, int]], got: str
) -> None:
    model = make()
    captured = capture(model, squares, series(4, 5), only_x)
    for rows_, length in fits:
        batch = series(rows_, length)
        done = run(captured, even_cuts(captured, 2), batch, weights_of(captured))
        assert torch.allclose(done.loss, squares(model(batch["x"]), batch).detach(), atol=1e-6)
    for rows_, length in others:
        with pytest.raises(JobError, match=got):
            captured.values(series(rows_, length))


@pytest.mark.parametrize("name", ["mlp", "token_mean", "batchnorm", "two_inputs"])
def test_a_first_batch_of_one_row_leaves_the_number_of_rows_free(name: str) -> None:
    entry = ZOO[name]
    captured = capture(entry.build(0), entry.loss, rows(sample(name), 0, 1), entry.inputs)
    assert captured.graph.fingerprint == captured_of(name).graph.fingerprint
    assert captured.graph.sample_rows == 2
    assert equals_eager(name, captured, sample(name, 5))


def branches(h: Tensor) -> Tensor:
    if h.sum() > 0:
        h = h * 2
    return h


def to_numpy(h: Tensor) -> Tensor:
    return h + torch.from_numpy(h.detach().numpy() * 2)


def raises(h: Tensor) -> Tensor:
    raise ValueError(f"{h.ndim} dimensions, too few")


def does_not_fit(h: Tensor) -> Tensor:
    return functional.linear(h, torch.ones(3, 77))


def asks_too_much(h: Tensor) -> Tensor:
    nine = (h * 0 + 9).long()
    return functional.embedding(nine, torch.ones(9, 6)).sum(1)


def raises_from_itself(h: Tensor) -> Tensor:
    error = ValueError(f"{h.ndim} dimensions, its own cause")
    raise error from error


def draws(h: Tensor) -> Tensor:
    return h * random.random() if h.sum() < 1e9 else h


def derives(h: Tensor) -> Tensor:
    return torch.autograd.grad(h.sum(), h)[0] if h.sum() < 1e9 else h


@pytest.mark.parametrize(
    ("does", "line", "kind", "remedy"),
    [
        (branches, "if h.sum() > 0:", "GuardOnDataDependentSymNode", "torch.where"),
        (to_numpy, "return h + torch.from_numpy(h.detach().numpy() * 2)", "RuntimeError", "torch.where"),
        (raises, 'raise ValueError(f"{h.ndim} dimensions, too few")', "ValueError: 2 dimensions", "by hand"),
        (does_not_fit, "return functional.linear(h, torch.ones(3, 77))", "shapes cannot be multiplied", "by hand"),
        (asks_too_much, "return functional.embedding(nine, torch.ones(9, 6)).sum(1)", "IndexError", "by hand"),
        (raises_from_itself, "raise error from error", "its own cause", "by hand"),
        (draws, "return h * random.random() if h.sum() < 1e9 else h", "Guard", "torch.where"),
        (derives, "return torch.autograd.grad(h.sum(), h)[0] if h.sum() < 1e9 else h", "Guard", "torch.where"),
    ],
)
def test_a_model_that_cannot_be_exported_is_told_by_module_line_and_remedy(
    does: Callable[[Tensor], Tensor], line: str, kind: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch lets nothing of it go further
    try:
        with pytest.raises(CaptureError) as raised:
            capture(Net(does), squares, pairs(), only_x)
    finally:
        logger.removeHandler(caplog.handler)
    error = raised.value
    assert error.subject.startswith("module 'inner' (Inner) of the model")
    assert f"{__file__}:" in error.subject
    assert f"`{line}`" in error.subject
    assert kind in error.got
    assert "\n" not in str(error)
    assert remedy in error.remedy
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == [], "torch tells it on pages of its own"


def test_what_fails_in_the_graph_alone_is_not_said_to_be_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise ValueError("only here")

    monkeypatch.setattr(sys.modules["roundelay.frontend.capture"], "clean", fails)
    with pytest.raises(ValueError, match="only here"):
        capture(Net(), squares, pairs(), only_x)


def quotes(h: Tensor) -> Tensor:
    raise TypeError('no size: "KeyboardInterrupt: <EMPTY MESSAGE>"')


def names_it_as_cause(h: Tensor) -> Tensor:
    reason = ValueError()
    reason.__cause__ = KeyboardInterrupt()
    raise RuntimeError("no size") from reason


def fails_while_it_leaves(h: Tensor) -> Tensor:
    try:
        raise KeyboardInterrupt
    finally:
        raise_other()


def raise_other() -> None:
    raise RuntimeError("no size") from ValueError()


@pytest.mark.parametrize("interrupted", [quotes, names_it_as_cause, fails_while_it_leaves])
def test_an_interrupt_is_none_of_the_model_s_errors(interrupted: Callable[[Tensor], Tensor]) -> None:
    """One that strikes while torch reads a size in a symbolic shape comes out of it as a TypeError."""
    with pytest.raises(KeyboardInterrupt):
        capture(Net(interrupted), squares, pairs(), only_x)


def test_an_interrupt_before_the_capture_is_not_its_own() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(CaptureError):
            capture(Net(raises), squares, pairs(), only_x)


def test_item_as_a_number_alone_is_captured_and_equals_eager() -> None:
    model = Net(lambda h: h * h.detach().sum().item())
    captured, batch = capture(model, squares, pairs(), only_x), pairs()
    wanted = squares(model(batch["x"]), batch)
    wanted.backward()
    for cut in captured.graph.cuts:
        done = run(captured, cut_after(captured, [cut]), batch, weights_of(captured))
        assert torch.equal(done.loss, wanted.detach())
        assert differing(done.grads, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) == []


@pytest.mark.parametrize("name", ["batchnorm", "buffer_reader", "dropout_heavy", "tied_head"])
def test_capture_leaves_the_model_the_batch_and_the_generator_as_they_were(name: str) -> None:
    entry, batch = ZOO[name], sample(name)
    model = entry.build(0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    objects = {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    before = torch.get_rng_state()
    captured = capture(model, entry.loss, batch, entry.inputs)
    assert torch.equal(before, torch.get_rng_state())
    assert captured.model is model
    assert differing(dict(model.state_dict()), kept) == []
    assert {n: id(t) for n, t in model.state_dict(keep_vars=True).items()} == objects
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.parameters())
    assert modules_with_hooks(model) == []
    assert all(module.training for module in model.modules())
    again = sample(name)
    named = [dict(enumerate(b)) if isinstance(b, tuple) else b for b in (batch, again)]
    assert all(torch.equal(value, named[1][key]) for key, value in named[0].items())


@pytest.mark.parametrize("name", ["batchnorm", "views", "gpt2"])
def test_running_stages_leaves_the_model_as_it_was(name: str) -> None:
    captured = captured_of(name)
    kept = {n: t.clone() for n, t in captured.model.state_dict().items()}
    for mode in ("stash", "recompute", "mixed"):
        run(captured, even_cuts(captured, 2), sample(name), weights_of(captured), mode=mode)
    assert differing(dict(captured.model.state_dict()), kept) == []
    assert all(p.grad is None for p in captured.model.parameters())


def test_a_failed_capture_leaves_no_hooks() -> None:
    model = Net(raises)
    with pytest.raises(CaptureError):
        capture(model, squares, pairs(), only_x)
    assert modules_with_hooks(model) == []


def fingerprint(model: nn.Module, loss: Any = squares, batch: Any = None) -> str:
    return capture(model, loss, batch or pairs(), only_x).graph.fingerprint


def test_the_fingerprint_is_the_models_and_the_losss_not_the_batchs_or_the_weights() -> None:
    usual = fingerprint(Net())
    assert fingerprint(Net()) == usual
    assert [fingerprint(Net(), batch=pairs(n)) for n in (1, 2, 6, 7)] == [usual] * 4


OTHERS: dict[str, Callable[[], str]] = {
    "width": lambda: fingerprint(Net(width=7)),
    "operation": lambda: fingerprint(Net(torch.tanh)),
    "positional number": lambda: fingerprint(Net(lambda h: h * 3.0)),
    "another positional number": lambda: fingerprint(Net(lambda h: h * 4.0)),
    "keyword": lambda: fingerprint(Net(lambda h: torch.add(h, h, alpha=3))),
    "another keyword": lambda: fingerprint(Net(lambda h: torch.add(h, h, alpha=4))),
    "depth": lambda: fingerprint(nn.Sequential(Net(), Net())),
    "loss reads more": lambda: fingerprint(Net(), lambda o, b: squares(o, b) + b["x"].sum()),
    "loss counts": lambda: fingerprint(Net(), lambda o, b: (squares(o, b), 4)),
    "half frozen": lambda: fingerprint(half_frozen()),
    "within no_grad": lambda: fingerprint(Net(lambda h: h + without_gradient(h, 2.0))),
    "another within no_grad": lambda: fingerprint(Net(lambda h: h + without_gradient(h, 3.0))),
}


def half_frozen() -> nn.Module:
    model = Net()
    model.last.requires_grad_(False)
    return model


def without_gradient(h: Tensor, factor: float) -> Tensor:
    with torch.no_grad():
        return (h * factor).tanh()


def test_fingerprints_of_different_models_differ() -> None:
    usual = fingerprint(Net())
    found = {name: make() for name, make in OTHERS.items()}
    assert len({usual, *found.values()}) == len(found) + 1


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        (lambda b: b["x"], "got Tensor"),
        (lambda b: (b["x"], b["y"]), "got tuple"),
        (lambda b: ((b["x"],),), "got tuple"),
        (lambda b: ((b["x"],), [1]), "got tuple"),
    ],
)
def test_inputs_that_return_no_arguments_and_keywords_are_refused(inputs: Any, got: str) -> None:
    with pytest.raises(JobError, match=got):
        capture(Net(), squares, pairs(), inputs)


def test_a_call_in_another_layout_than_the_first_is_refused() -> None:
    more: list[float] = []
    captured = capture(Net(), squares, pairs(), lambda b: ((b["x"], *more), {}))
    more.append(2.0)
    with pytest.raises(JobError, match=r"(?s)got 1 tensors in the layout .* with constants \[2.0\]"):
        captured.values(pairs())
    with pytest.raises(JobError, match=r"got sizes \(4, 7\); expected sizes \('any', 6\)"):
        capture(Net(), squares, pairs(), only_x).values(pairs(width=7))


def test_parameters_and_buffers_are_the_models_own_objects_under_their_first_names() -> None:
    captured = captured_of("tied_head")
    named = dict(captured.model.named_parameters())
    assert {n: id(p) for n, p in captured.parameters().items()} == {n: id(p) for n, p in named.items()}
    assert "head.weight" not in captured.parameters()
    norms = captured_of("batchnorm")
    assert {n: id(b) for n, b in norms.buffers().items()} == {n: id(b) for n, b in norms.model.named_buffers()}
    assert norms.mutated_buffers() == norms.buffers().keys()


def test_a_model_of_a_bare_parameter_trains_it() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight, x

    captured = capture(Bare(), lambda o, b: (3 * o[0]).sum(), pairs(), only_x)
    done = run(captured, cut_after(captured, []), pairs(), weights_of(captured))
    assert torch.equal(done.grads["weight"], torch.full((6,), 3.0))


@pytest.mark.parametrize("count", [1, 6])
def test_a_first_batch_of_windows_into_another_tensor_asks_nothing_of_later_ones(count: int) -> None:
    text = torch.randint(5, (count, 5))
    windows = (text[:, :-1], text[:, -1])
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 5))
    captured = capture(model, lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]), windows)
    own = (torch.randint(5, (4, 4)), torch.randint(5, (4,)))
    for batch in (windows, own, *split(windows, 3), *split(own, 3)):
        assert torch.equal(next(iter(captured.values(batch).values())), batch[0])


def test_a_loader_of_another_thread_that_seeds_is_not_the_forward_s_doing() -> None:
    """It waits while the forward is traced."""
    generators, ended = Generators(), threading.Event()

    def read() -> None:
        while not ended.is_set():
            generators.seed(0, 0)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(5):
            capture(Net(), squares, pairs(), inputs=only_x)
    finally:
        ended.set()
        reader.join()
