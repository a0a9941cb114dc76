"""The zoo keeps its promises: without them a test that runs "for every model" would prove less than it says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from . import MODELS, ZOO, Batch, Entry, arguments, rows, scalar

SAMPLE_ROWS = 4
EVERY = pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO.keys())
WHOLE = pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS.keys())  # and the whole networks


class Flat(nn.Module):
    """`model` with a flat list of tensors going in and coming out; cache objects in its outputs are dropped."""

    def __init__(self, model: nn.Module, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the leaves of the model's outputs."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return tensors(self.model(*args, **kwargs))


@pytest.fixture(autouse=True)
def silence(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which anything is printed, or a library logs a warning."""
    # These two hand nothing to the root logger, and keep the stream they found when they were imported.
    loggers = [logging.getLogger(name) for name in ("transformers", "torch")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield
    for logger in loggers:
        logger.removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert capfd.readouterr() == ("", "")


def tensors(tree: Any) -> tuple[Tensor, ...]:
    """Return the tensor leaves of `tree`."""
    return tuple(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def outputs_of(entry: Entry, model: nn.Module, batch: Batch) -> Any:
    """Call `model` on `batch` in the manner of `entry`."""
    args, kwargs = arguments(entry, batch)
    return model(*args, **kwargs)


def train(entry: Entry, model: nn.Module, batch: Batch) -> Tensor:
    """Run forward, loss and backward; return the loss."""
    loss = scalar(entry.loss(outputs_of(entry, model, batch), batch))
    loss.backward()
    return loss.detach()


def exported(entry: Entry, model: nn.Module) -> tuple[Flat, ExportedProgram]:
    """Export `model` on a sample of 4 rows, every dimension of every input Dim.AUTO."""
    leaves, spec = pytree.tree_flatten(arguments(entry, rows(entry.batches(1, 1)[0], 0, SAMPLE_ROWS)))
    flat = Flat(model, spec)
    dims = tuple(dict.fromkeys(range(leaf.dim()), Dim.AUTO) for leaf in leaves)
    return flat, export(flat, tuple(leaves), dynamic_shapes={"leaves": dims}, strict=False)


def shapes(batch: Batch) -> list[torch.Size]:
    """Return the shape of every tensor of `batch`."""
    return [leaf.shape for leaf in tensors(batch)]


def restored(model: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """Put `state` back into the buffers and parameters of `model`."""
    model.load_state_dict(state)
    return model


@WHOLE
def test_a_seed_builds_the_same_weights(entry: Entry) -> None:
    first, second, other = (entry.build(seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, other[name]) for name, value in first.items())


@WHOLE
def test_batches_depend_on_their_seed_alone(entry: Entry) -> None:
    before = torch.get_rng_state()
    first, second, other = (tensors(entry.batches(seed, 3)) for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(first, other, strict=True))


@WHOLE
def test_every_trainable_parameter_gets_a_finite_gradient(entry: Entry) -> None:
    model = entry.build(0)
    for batch in entry.batches(1, 2):
        assert train(entry, model, batch).isfinite()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or (parameter.grad.isfinite().all() and parameter.grad.any()), name


@WHOLE
def test_training_draws_what_the_seed_decides(entry: Entry) -> None:
    state = {name: value.clone() for name, value in entry.build(0).state_dict().items()}
    model, batch = entry.build(0), entry.batches(1, 1)[0]
    assert model.training
    losses = []
    for seed in (7, 7, 8):
        restored(model, state)
        torch.manual_seed(seed)
        losses.append(train(entry, model, batch))
    assert torch.equal(losses[0], losses[1])
    assert entry.draws == (not torch.equal(losses[0], losses[2]))


@WHOLE
def test_short_and_varying_batches_train(entry: Entry) -> None:
    model, batches = entry.build(0), entry.batches(1, 5, short=True, varying=True)
    assert [shape[0] for batch in batches for shape in shapes(batch)[:1]] == [6, 6, 3, 6, 3]
    assert entry.varies == (shapes(batches[0]) != shapes(batches[1]))
    assert all(train(entry, model, batch).isfinite() for batch in batches)
    assert len({tuple(shapes(batch)) for batch in entry.batches(1, 5)}) == 1


@WHOLE
def test_its_flags_are_true(entry: Entry) -> None:
    model = entry.build(0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train(entry, model, entry.batches(1, 1)[0])
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    names = list(model.named_parameters(remove_duplicate=False))
    assert entry.buffers == bool(changed)
    assert entry.tied == (len(names) > len(list(model.parameters())))


@EVERY
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
def test_an_export_of_four_rows_equals_eager_at_other_sizes_or_refuses_them(entry: Entry) -> None:
    model = entry.build(0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    flat, program = exported(entry, model)
    module = program.module()
    usual, other = entry.batches(2, 2, varying=True)
    for batch in [rows(each, 0, few) for each, few in ((usual, 1), (usual, 6), (other, 2))]:
        leaves, results = pytree.tree_leaves(arguments(entry, batch)), []
        if entry.specialises and shapes(batch)[0][1:] != shapes(usual)[0][1:]:
            with pytest.raises(AssertionError, match="Guard failed"):
                module(*leaves)
            continue
        for run in (flat, module):
            restored(model, state)
            torch.manual_seed(9)
            results.append((*run(*leaves), *(buffer.clone() for buffer in model.buffers())))
        assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_token_mean_counts_differ_from_row_to_row() -> None:
    entry = ZOO["token_mean"]
    batch = entry.batches(1, 1)[0]
    assert isinstance(batch, dict)
    kept = (batch["labels"] >= 0).sum(1)
    assert kept.min() > 0
    assert len(set(kept.tolist())) > 2


def test_the_classifier_sees_real_padding() -> None:
    batch = ZOO["bert_classifier"].batches(1, 1)[0]
    assert isinstance(batch, dict)
    assert 0 < (batch["attention_mask"] == 0).sum() < batch["attention_mask"].numel()
