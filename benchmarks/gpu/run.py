"""Stages as threads with a stream each on one GPU, beside plain PyTorch on it. Not yet run: no GPU at hand."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common import alternate, asked, report, spread, table
from roundelay import Job, capture, plan
from roundelay.api.training import Length, Session

WIDTH, LAYERS, ROWS, MICRO_BATCHES = 2048, 12, 2048, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = torch.randn(ROWS, WIDTH)
    while True:
        yield rows, rows


def loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(outputs, batch[1])


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)


def plain(steps: int) -> float:
    """Milliseconds of a batch of the same micro-batches, gradients added up, copies pinned."""
    made, device = model().cuda(), torch.device("cuda", 0)
    stepper = optimizer(list(made.named_parameters()))
    rows = next(batches(0))[0].pin_memory()
    start = 0.0
    for step in range(steps + steps // 4):
        if step == steps // 4:
            torch.cuda.synchronize()
            start = time.perf_counter()
        for part in rows.chunk(MICRO_BATCHES):
            here = part.to(device, non_blocking=True)
            (loss(made(here), (here, here)) / MICRO_BATCHES).backward()
        stepper.step()
        stepper.zero_grad()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def ours(workers: int, rule: str, steps: int) -> float:
    """Milliseconds of a batch."""
    job = Job(model=model(), loss=loss, batches=batches, optimizer=optimizer, steps=steps)
    captured = capture(job)
    devices = ",".join(["cuda:0"] * workers)
    chosen = plan(
        job, captured=captured, workers=workers, rule=rule, micro_batches=MICRO_BATCHES, devices=devices
    )  # fmt: skip
    trained = Session(job, captured, chosen, 0, Length(steps=steps)).run(notify=lambda event: None)
    return 1e3 * ROWS / trained.samples_per_second


def main() -> None:
    if not torch.cuda.device_count():
        print("Left out: torch sees no CUDA device here.")
        return
    what = asked(__doc__ or "", 5)
    steps = 20 if what.short else 60
    candidates = {"plain PyTorch": functools.partial(plain, steps)}
    for workers, rule in ((1, "gpipe"), (2, "1f1b"), (2, "pipeoptim")):
        candidates[f"{workers} workers, {rule}"] = functools.partial(ours, workers, rule, steps)
    found = alternate(candidates, what.repeats)
    rows = [[name, spread(values)] for name, values in found.items()]
    report(what, f"{torch.cuda.get_device_name(0)}\n\n" + table(["", "ms per batch"], rows), {"ms": found})


if __name__ == "__main__":
    main()
