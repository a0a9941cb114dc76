"""How fast this machine computes: seconds of a fixed piece of work with one intra-op thread.

A quota of less than a core lets a thread compute for some 20 of 100 milliseconds, say, and then holds it: what a short
piece of work sees of that is chance. So the thread's own time is measured, and the quota counted.
"""

from __future__ import annotations

import time

import torch

from roundelay.cores import core_quota

REPEATS = 15
_SIZE = 384


def probe_s() -> float:
    """Seconds of a few products and sums of matrices: the least of some repetitions, longer by a quota of a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.arange(_SIZE * _SIZE, dtype=torch.float32).reshape(_SIZE, _SIZE).remainder(7.0)
        return min(_once(a) for _ in range(REPEATS)) / min(1.0, core_quota() or 1.0)
    finally:
        torch.set_num_threads(before)


def _once(a: torch.Tensor) -> float:
    start = time.thread_time()
    for _ in range(4):
        a = (a @ a).tanh() + a.softmax(-1)
    return time.thread_time() - start
