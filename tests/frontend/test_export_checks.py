"""What export would lose without a word is refused in words."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roundelay.errors import CaptureError, JobError
from roundelay.frontend import capture
from roundelay.job import Job
from roundelay.planning.validate_job import check_job

BATCH = (torch.ones(3, 4), torch.tensor([0, 1, 1]))


class Twice(torch.autograd.Function):
    """Doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Return the doubled gradient."""
        return 2 * gradient


class Around(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.head, self.between = nn.Linear(4, 4), nn.Linear(4, 2), between

    def forward(self, features: Tensor) -> Tensor:
        """Return rows x classes."""
        out: Tensor = self.head(self.between(self.first(features)))
        return out


def loss(outputs: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy."""
    return nn.functional.cross_entropy(outputs, batch[1])


def hooked(x: Tensor) -> Tensor:
    """Doubles the gradient by a hook."""
    x.register_hook(lambda gradient: 2 * gradient)
    return x.relu()


def checkpointed(x: Tensor, *, reentrant: bool) -> Tensor:
    """Torch's own autograd functions and hooks, which change no gradient."""
    out: Tensor = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=reentrant)
    return out


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (Twice.apply, "autograd.Function 'Twice'.*backward of its own.*custom_op"),
        (hooked, "hook on its gradient"),
        (lambda x: x * random.random(), "drawn by random;.*torch.rand"),
        (lambda x: x * float(np.random.rand()), "drawn by numpy.random"),
    ],
    ids=["function", "hook", "random", "numpy"],
)
def test_code_that_export_does_not_see_is_refused(between: Callable[[Tensor], Tensor], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(Around(between), loss, BATCH)
    capture(Around(torch.relu), loss, BATCH)


def test_what_listens_is_taken_away_again() -> None:
    before = torch.Tensor.register_hook
    with pytest.raises(CaptureError):
        capture(Around(hooked), loss, BATCH)
    assert torch.Tensor.register_hook == before


def test_activation_checkpointing_is_let_through_where_export_sees_it() -> None:
    captured = capture(Around(lambda x: checkpointed(x, reentrant=False)), loss, BATCH)
    assert "aten.tanh.default" in [op.target for op in captured.graph.ops]
    with pytest.raises(CaptureError, match=r"'CheckpointFunction'.*recompute"):
        capture(Around(lambda x: checkpointed(x, reentrant=True)), loss, BATCH)


def parameter_hook(model: nn.Module) -> None:
    model.get_parameter("first.weight").register_hook(lambda gradient: 2 * gradient)


def accumulated_hook(model: nn.Module) -> None:
    model.get_parameter("first.weight").register_post_accumulate_grad_hook(lambda parameter: None)


def module_hook(model: nn.Module) -> None:
    model.get_submodule("first").register_full_backward_hook(lambda module, given, made: None)


def scripted(model: nn.Module) -> None:
    model.add_module("first", torch.jit.script(nn.Linear(4, 4)))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # since torch 2.14
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (parameter_hook, "parameter 'first.weight': got a hook"),
        (accumulated_hook, "parameter 'first.weight': got a hook"),
        (module_hook, r"module 'first' \(Linear\): got a hook"),
        (scripted, "module 'first': got a RecursiveScriptModule"),
    ],
)
def test_parts_that_no_stage_would_keep_are_refused(change: Callable[[nn.Module], None], words: str) -> None:
    model = Around(torch.relu)
    change(model)
    with pytest.raises(CaptureError, match=words):
        capture(model, loss, BATCH)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind: type[nn.Module]) -> None:
    batch = (torch.tensor([[0, 1], [2, 3], [1, 1]]), BATCH[1])
    for sparse in (False, True):
        model = nn.Sequential(kind(4, 4, sparse=sparse), nn.Flatten(), nn.LazyLinear(2))
        model(batch[0])
        if sparse:
            with pytest.raises(CaptureError, match="sparse=True"):
                capture(model, loss, batch)
        else:
            capture(model, loss, batch)


def test_a_lazy_model_is_refused_until_it_was_called() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    job = Job(model=model, loss=loss, batches=lambda epoch: [BATCH], optimizer=lambda named: torch.optim.SGD(named))
    with pytest.raises(JobError, match="lazy module"):
        check_job(job)
    model(BATCH[0])
    check_job(job)


def test_sizes_that_torch_cannot_simplify_are_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Pooling that rounds up leaves such inequalities; torch logs a traceback of a hundred lines for each."""
    batch = (torch.ones(3, 3, 40, 40), BATCH[1])
    pool = nn.MaxPool2d(3, 2, ceil_mode=True)
    first = nn.Conv2d(3, 2, 7, 2, 3)
    model = nn.Sequential(first, pool, pool, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2))
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    logger.addHandler(caplog.handler)
    try:
        capture(model, loss, batch)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
