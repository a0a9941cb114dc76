"""Stage functions against eager autograd: forward and backward of a transformer block, a ResNet block and an LSTM.

The captured stage (weights as arguments, a tape, gradients returned) and the original module (``loss.backward()``) take
turns on the same batch, one intra-op thread, without an optimizer step. The last columns are of the compiled stage in
mode ``stash``, and of the seconds until it is compiled: with what inductor has cached from earlier runs, unless
TORCHINDUCTOR_CACHE_DIR names an empty folder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundelay
from benchmarks.common import asked, report, table
from roundelay.errors import CaptureError
from roundelay.frontend import Captured, RngKey
from roundelay.ir.graph import LOSS
from roundelay.lower.partition import partition
from roundelay.planning.stage_profiler import compile_for

MODES = ("stash", "mixed", "recompute")


class Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        made: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.after(x))))
        return made


class Residual(nn.Module):
    """A basic ResNet block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.norm_one(self.one(x)))
        return nn.functional.relu(self.norm_two(self.two(y)) + x)


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.lstm(x)[0]
        return made


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer block, width 256": (lambda: Attention(256, 8), (8, 128, 256)),
    "transformer block, width 64": (lambda: Attention(64, 4), (8, 64, 64)),
    "ResNet block, 64 channels": (lambda: Residual(64), (8, 64, 28, 28)),
    "LSTM, 2 layers of 256": (lambda: Recurrent(256), (16, 32, 256)),
}


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs * outputs).mean()


def eager(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Forward and backward as everybody writes it."""
    loss(model(batch["x"]), batch).backward()
    for parameter in model.parameters():
        parameter.grad = None


def staged(captured: Captured, batch: dict[str, torch.Tensor], mode: Any) -> Callable[[], None]:
    """Forward and backward of the one stage that is the whole model."""
    spec = partition(captured.graph, [(captured.graph.ops[-1].name,)]).stages[0]
    function, parameters = captured.stage(spec), captured.parameters()
    buffers = {name: buffer.clone() for name, buffer in captured.buffers().items()}
    values = captured.values(batch)
    seed = torch.ones(())

    def once() -> None:
        inputs = {name: values[name] for name in function.inputs}
        _, tape = function.forward(parameters, buffers, inputs, RngKey(0, 0), mode=mode)
        function.backward(tape, {LOSS: seed}, parameters)

    return once


def compiled(captured: Captured, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], None] | None, str]:
    """The same, compiled, and how long that took; nothing, and why, where inductor cannot do it."""
    start, captured = time.perf_counter(), captured.compiling("stash")
    try:
        compile_for(captured, partition(captured.graph, [(captured.graph.ops[-1].name,)]), batch, [0])
    except CaptureError:
        return None, "refused"
    return staged(captured, batch, "stash"), f"{time.perf_counter() - start:.1f}"


def seconds(once: Callable[[], None]) -> float:
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def main() -> None:
    what = asked(__doc__ or "", 5)
    times = 16 if what.short else 100
    rows, numbers = [], {}
    for name, (build, shape) in BLOCKS.items():
        torch.manual_seed(0)
        model, batch = build(), {"x": torch.randn(shape)}
        job = roundelay.Job(
            model=model, loss=loss, batches=lambda epoch, batch=batch: [batch], optimizer=lambda n: torch.optim.SGD(n)
        )
        captured = roundelay.capture(job)
        candidates = {"eager": lambda model=model, batch=batch: eager(model, batch)}
        candidates |= {mode: staged(captured, batch, mode) for mode in MODES}
        fast, start_s = compiled(captured, batch)
        candidates |= {"compiled": fast} if fast is not None else {}
        found: dict[str, list[float]] = {key: [] for key in candidates}
        for turn in range(times * what.repeats + 5):
            for key, once in candidates.items():
                taken = seconds(once)
                if turn >= 5:
                    found[key].append(taken)
        base = statistics.median(found["eager"])
        ratios = [f"{statistics.median(found[mode]) / base:.3f}" for mode in (*MODES, "compiled") if mode in found]
        ratios += ["refused"] * (fast is None)
        rows.append([name, f"{1e3 * base:.2f}", *ratios, start_s])
        numbers[name] = found
    columns = ["", "eager, ms", *(f"{mode}, x eager" for mode in (*MODES, "compiled")), "compiling, s"]
    report(what, table(columns, rows), {"seconds": numbers})


if __name__ == "__main__":
    main()
