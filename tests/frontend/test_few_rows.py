"""Capture computes on few rows what needs values, and gives the same graph as if it had computed on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.frontend import Captured, capture, describe_graph
from roundelay.frontend.few_rows import same_small_sizes
from roundelay.frontend.graph_run import run_nodes

ROWS, WIDTH = 64, 8


class Layered(nn.Module):
    """Two layers, and anything between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 4."""
        made: Tensor = self.last(self.between(self.norm(self.first(x))))
        return made


class MostRows(TorchDispatchMode):
    """Records the most rows of real floating-point tensors that operations compute."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default) and type(result) is Tensor:
            self.rows = max(self.rows, len(result))
        return result


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sample be treated as a large one."""
    monkeypatch.setattr(describe_graph, "LIGHT_BYTES", 0)
    torch.manual_seed(0)


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.arange(rows) % 4


def entropy(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


def rows_computed(model: nn.Module, loss: Any = entropy, data: Any = None, **how: Any) -> tuple[Captured, int]:
    with MostRows() as most:
        captured = capture(model, loss, batch() if data is None else data, **how)
    return captured, most.rows


def test_two_rows_are_computed_and_the_graph_describes_all() -> None:
    captured, rows = rows_computed(Layered())
    assert rows == 2
    assert captured.graph.sample_rows == ROWS
    assert captured.graph.values["linear_1"].shape == (ROWS, 4)
    assert {op.name: op.flops for op in captured.graph.ops}["linear_1"] == 2 * ROWS * 16 * 4
    assert captured.graph.labels_per_row == 1.0
    assert captured.mutated_buffers() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_a_mean_that_stays_zero_on_the_first_rows_is_still_written() -> None:
    model, (x, y) = Layered(), batch()
    nn.init.zeros_(model.first.bias)
    x[:32] = 0.0
    assert "norm.running_mean" in rows_computed(model, data=(x, y))[0].mutated_buffers()


class NeedsRows(nn.Module):
    """Exported for batches of five rows or more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 4."""
        made: Tensor = self.layer(x) if x.size(0) > 4 else self.layer(x).relu()
        return made


def test_more_rows_are_computed_where_the_graph_does_not_hold_for_few() -> None:
    assert rows_computed(NeedsRows())[1] == 8


def test_sizes_of_one_are_told_from_those_of_the_sample() -> None:
    exported = capture(Layered(lambda h: h), entropy, batch()).builder.exported
    sizes = {name: [value.shape] for name, value in run_nodes(exported, [batch(2)[0]])[0].items()}
    assert same_small_sizes(exported, sizes)
    for name in ("linear", "linear_1"):
        assert not same_small_sizes(exported, {**sizes, name: [torch.Size((1, 16))]})


def doubled(o: Tensor, b: Any) -> Tensor:
    """A loss that fails on few rows."""
    return entropy(o, b) + o[20].mean()


def late(o: Tensor, b: Any) -> Tensor:
    """A loss that reads the weights of a batch only where there is one."""
    value = F.cross_entropy(o, b[1])
    return value + (o.mean(1) * b[2]).mean() if bool((b[1] == 3).any()) else value


def without_labels(o: Tensor, b: Any) -> Tensor:
    """A loss whose first rows have no label."""
    return F.cross_entropy(o, b[1].where(torch.arange(len(o)) >= 12, -100))


def test_all_rows_are_computed_where_the_loss_is_another_on_few() -> None:
    assert rows_computed(Layered(), doubled)[1] == 32
    x, _ = batch()
    data = (x, (torch.arange(ROWS) == 40) * 3, torch.randn(ROWS))
    captured, rows = rows_computed(Layered(), late, data, inputs=lambda b: ((b[0],), {}))
    assert rows == ROWS
    assert captured.graph.batch == ("batch.1", "batch.2")
    assert rows_computed(Layered(), lambda o, b: o[b[1] == 3].mean())[1] == 8  # not finite on two rows
    captured, rows = rows_computed(Layered(), without_labels)
    assert rows == 32
    assert captured.graph.labels_per_row == (ROWS - 12) / ROWS


def test_labels_are_those_of_the_whole_sample() -> None:
    x, y = batch()
    y[20:] = -100
    assert rows_computed(Layered(), data=(x, y))[0].graph.labels_per_row == 20 / ROWS


class OwnLoss(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layered()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.layer(x), y)


def test_so_are_those_that_a_model_counts() -> None:
    x, y = batch()
    y[20:] = -100
    captured, rows = rows_computed(OwnLoss(), lambda o, b: o, (x, y), inputs=lambda b: ((b[0], b[1]), {}))
    assert rows == 2
    assert captured.graph.labels_per_row == 20 / ROWS


def test_what_inputs_keeps_is_as_after_one_call() -> None:
    calls = {"number": 0}

    def inputs(data: Any) -> Any:
        calls["number"] += 1
        return (data[0],), {}

    assert rows_computed(Layered(), inputs=inputs)[1] == 2
    assert calls["number"] == 1


def test_an_operation_that_needs_values_is_computed_on_all_rows() -> None:
    captured, rows = rows_computed(Layered(lambda h: h + torch.cond(h.sum() > 0, torch.relu, torch.sigmoid, (h,))))
    assert rows == ROWS
    assert captured.graph.values["linear_1"].shape == (ROWS, 4)


def test_values_are_freed_after_their_last_use() -> None:
    captured = capture(Layered(), entropy, batch())
    values = run_nodes(captured.builder.exported, [batch()[0]], keep={"linear_1"})[0]
    assert list(values) == ["linear_1"]


class Selected(nn.Module):
    """Rows that a mask selects, written into by a view of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Selected rows x 4."""
        rows = torch.relu(self.first(x))[mask]
        rows[:, :8].mul_(5.0)
        made: Tensor = self.last(rows)
        return made


def test_rows_that_select_nothing_do_not_show_what_is_written() -> None:
    found = []
    for empty in (0, 20):
        torch.manual_seed(0)
        mask = torch.arange(ROWS) % 3 != 1
        mask[:empty] = False
        batch = {"x": torch.randn(ROWS, WIDTH), "mask": mask, "y": torch.randint(4, (ROWS,))}
        model = Selected()
        graph = capture(
            model,
            lambda outputs, batch: F.cross_entropy(outputs, batch["y"][batch["mask"]]),
            batch,
            lambda batch: ((batch["x"], batch["mask"]), {}),
        ).graph
        found.append([graph.ops[cut].name for cut in graph.cuts])
    assert found[0] == found[1]
