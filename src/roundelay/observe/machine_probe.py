"""How fast this machine computes: seconds of a fixed piece of work with one intra-op thread."""

from __future__ import annotations

import time

import torch

REPEATS = 5
_SIZE = 384


def probe_s() -> float:
    """Seconds of a few products and sums of matrices, the least of some repetitions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.arange(_SIZE * _SIZE, dtype=torch.float32).reshape(_SIZE, _SIZE).remainder(7.0)
        return min(_once(a) for _ in range(REPEATS))
    finally:
        torch.set_num_threads(before)


def _once(a: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(4):
        a = (a @ a).tanh() + a.softmax(-1)
    return time.perf_counter() - start
