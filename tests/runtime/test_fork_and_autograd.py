"""A forked child's autograd: its engine is made anew before threads need it, as torch does not lock there."""

from __future__ import annotations

import threading

import torch

from roundelay.launching.forked_call import isolated

THREADS, CHILDREN = 4, 40


def saved_in_threads() -> int:
    """Save a tensor for a backward, for the first time in this process, in several threads at once."""
    ready, done = threading.Barrier(THREADS), []

    def save() -> None:
        weight = torch.ones(3, requires_grad=True)
        ready.wait(10.0)
        done.append(weight.exp().sum().item())

    threads = [threading.Thread(target=save) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    return len(done)


def test_threads_of_a_forked_child_may_save_tensors_at_once() -> None:
    torch.ones((), requires_grad=True).exp().backward()  # there is an engine to be made anew
    assert [isolated(saved_in_threads, "saving", limit_s=30.0) for _ in range(CHILDREN)] == [THREADS] * CHILDREN
