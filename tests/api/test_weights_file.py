"""A model without memory takes its weights from a file, each worker those of its own stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import roundelay
from roundelay.errors import JobError
from roundelay.planning.weights_file import fill


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(self.embed(x)) * self.scale)
        return made


def job_of(model: nn.Module, weights: Path | None) -> roundelay.Job:
    def batches(epoch: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(epoch)
        return [{"x": torch.randint(11, (4, 3), generator=generator)} for _ in range(3)]

    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs.flatten(0, 1), batch["x"].flatten()),
        batches=batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        weights=weights,
    )


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Tied, Path]:
    """An ordinary model, and a folder with its weights in two files."""
    torch.manual_seed(3)
    model = Tied()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    first = next(iter(values))
    save_file({first: values.pop(first)}, tmp_path / "a.safetensors")
    save_file(values, tmp_path / "b.safetensors")
    return model, tmp_path


def test_a_model_without_memory_trains_to_the_same_bits(stored: tuple[Tied, Path]) -> None:
    model, path = stored
    with roundelay.empty_weights():
        empty = Tied()
    assert all(p.is_meta for p in empty.parameters())
    assert not empty.scale.is_meta  # type: ignore[union-attr]
    plan = roundelay.plan(job_of(model, None), workers=2, transport="gloo")
    for one, weights in ((model, None), (empty, path)):
        roundelay.train(job_of(one, weights), plan=plan, steps=3)
    assert empty.head.weight is empty.embed.weight
    for (name, left), right in zip(model.named_parameters(), empty.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_the_file_is_mapped_and_never_written(stored: tuple[Tied, Path]) -> None:
    _, path = stored
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with roundelay.empty_weights():
        empty = Tied()
    fill(empty, path)
    with torch.no_grad():
        empty.body.weight.add_(1.0)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_training_leaves_the_weights_that_a_session_began_with_alone(stored: tuple[Tied, Path]) -> None:
    model, _ = stored
    job = job_of(model, None)
    plan = roundelay.plan(job, workers=2)
    assert roundelay.verify(job, plan=plan, steps=4).equal  # the reference begins where the run began


Spoil = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda values: values.pop("body.bias"), "no value for 'body.bias'"),
        (lambda values: values.update(more=torch.zeros(1)), "'more', which the model has not"),
        (lambda values: values.update({"body.bias": torch.zeros(9)}), "shape (9,)"),
        (dict.clear, "no .safetensors file with tensors"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, spoil: Spoil, words: str) -> None:
    model = Tied()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    spoil(values)
    save_file(values, tmp_path / "w.safetensors")
    with pytest.raises(JobError) as caught:
        roundelay.capture(job_of(model, tmp_path / "w.safetensors"))
    assert words in str(caught.value)


def test_what_is_no_file_or_has_no_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_text("nothing")
    for path in (tmp_path / "bad.safetensors", tmp_path / "absent"):
        with pytest.raises(JobError, match="weights="):
            roundelay.capture(job_of(Tied(), path))
    with roundelay.empty_weights():
        empty = Tied()
    with pytest.raises(JobError, match="meta device"):
        roundelay.capture(job_of(empty, None))
