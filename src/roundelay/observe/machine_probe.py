"""How fast this machine computes: seconds of a fixed piece of work with so many intra-op threads.

A quota of less than a core lets a thread compute for some 20 of 100 milliseconds, say, and then holds it: what a short
piece of work sees of that is chance. So one thread's own time is measured, of several threads that of the clock before
they are held, and the quota is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from roundelay.cores import core_quota

REPEATS = 15
_SIZE = 384


def probe_s(threads: int) -> float:
    """Seconds of a few products and sums of matrices: the least of some repetitions, longer by a quota of fewer cores.

    Args:
        threads: intra-op ones.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    try:
        a = torch.arange(_SIZE * _SIZE, dtype=torch.float32).reshape(_SIZE, _SIZE).remainder(7.0)
        return min(_once(a, clock) for _ in range(REPEATS)) * max(1.0, threads / (core_quota() or threads))
    finally:
        torch.set_num_threads(before)


def _once(a: torch.Tensor, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(4):
        a = (a @ a).tanh() + a.softmax(-1)
    return clock() - start
