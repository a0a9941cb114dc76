"""On a GPU a recurrent layer's weights lie in one memory; tests/gpu shows that torch then says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from roundelay.job import Job
from roundelay.planning.planning import fitted

KINDS: dict[str, tuple[type[nn.RNNBase], int, dict[str, Any]]] = {
    "lstm": (nn.LSTM, 2, {}),
    "lstm with projection, both ways": (nn.LSTM, 2, {"proj_size": 4, "bidirectional": True}),
    "gru without biases, two layers, dropout": (nn.GRU, 3, {"bias": False, "num_layers": 2, "dropout": 0.1}),
    "rnn, rows first": (nn.RNN, 1, {"batch_first": True}),
}


class Model(nn.Module):
    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells, self.head = cells, nn.Linear((cells.proj_size or 8) * (1 + cells.bidirectional), 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(x)[0].mean(1))


@pytest.mark.parametrize("kind", KINDS)
def test_its_weights_are_flattened_as_the_module_would(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, number, options = KINDS[kind]
    cells = made(6, 8, **options)
    data = [(torch.randn(4, 5, 6), torch.randint(3, (4,)))]
    job = Job(
        model=Model(cells),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, workers=1, rule="1f1b")
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *args: seen.append(args))
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    (spec,) = fitted(captured, plan).stages
    captured.flatten_recurrent(spec, captured.parameters())
    assert not seen  # on the CPU
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    captured.flatten_recurrent(spec, captured.parameters())
    ((weights, *sizes),) = seen
    assert [id(weight) for weight in weights] == [id(weight) for weight in cells._flat_weights]
    each = len(weights) // cells.num_layers // (1 + cells.bidirectional)
    assert sizes == [
        each,
        cells.input_size,
        number,
        cells.hidden_size,
        cells.proj_size,
        cells.num_layers,
        cells.batch_first,
        cells.bidirectional,
    ]
