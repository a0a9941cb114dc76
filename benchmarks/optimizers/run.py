"""What an update and a prediction cost on the CPU: torch's optimizers by implementation, and PipeOptim's prediction.

3.4 million parameters in 54 tensors (eight transformer blocks of width 180 and an embedding), one thread. A *step* is
the optimizer's own, gradients at hand; a *prediction* is what `pipeoptim` makes of the same weights, one update ahead.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import alternate, asked, report, spread, table
from roundelay.weight_prediction import Outlook, predict

WIDTH, BLOCKS, TOKENS = 180, 8, 512
SHAPES = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,))
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
}
IMPLEMENTATIONS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
TIMES = 5
"""Steps in one turn."""


def weights() -> list[Tensor]:
    """Parameters with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, WIDTH), *(SHAPES * BLOCKS), (TOKENS, WIDTH), (WIDTH,), (WIDTH,), (TOKENS,), (TOKENS, WIDTH)]
    made = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def milliseconds(act: Callable[[], object]) -> float:
    """Of one, in a row of a few."""
    start = time.perf_counter()
    for _ in range(TIMES):
        act()
    return 1000 * (time.perf_counter() - start) / TIMES


def foreseen(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """All weights, one update ahead."""
    (group,) = optimizer.param_groups
    with torch.no_grad():
        for parameter in parameters:
            predict(optimizer, group, parameter, setting="improved", outlook=Outlook((float(group["lr"]),)), last=None)


def main() -> None:
    what = asked(__doc__ or "", 15)
    candidates: dict[str, Callable[[], float]] = {}
    for name, make in OPTIMIZERS.items():
        for how, extra in IMPLEMENTATIONS.items():
            optimizer = make(weights(), **extra)
            candidates[f"{name}: {how}"] = functools.partial(milliseconds, optimizer.step)
        parameters = weights()
        fused = make(parameters, fused=True)
        fused.step()  # a prediction needs a state
        candidates[f"{name}: prediction"] = functools.partial(
            milliseconds, functools.partial(foreseen, fused, parameters)
        )
    found = alternate(candidates, what.repeats)
    columns = [*IMPLEMENTATIONS, "prediction"]
    rows = [[name, *(spread(found[f"{name}: {column}"]) for column in columns)] for name in OPTIMIZERS]
    shape = f"{sum(p.numel() for p in weights()):,} parameters in {len(weights())} tensors; milliseconds\n\n"
    report(what, shape + table(["", *columns], rows), {"ms": found})


if __name__ == "__main__":
    main()
