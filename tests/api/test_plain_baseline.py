"""Plain PyTorch beside a run is the loop that everybody writes: it waits for its loader."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD

from roundelay.job import Job
from roundelay.proof.plain_baseline import measure
from tests.conftest import alive
from tests.runtime.interrupts import bystander, give, handled

ROWS, LOAD_S = 4, 0.03


def slowly(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ten batches, each of which takes a while to load."""
    for _ in range(10):
        time.sleep(LOAD_S)
        yield torch.randn(ROWS, 6), torch.zeros(ROWS, dtype=torch.long)


def job() -> Job:
    return Job(
        model=nn.Linear(6, 3),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=slowly,
        optimizer=partial(SGD, lr=0.05),
    )


def test_what_the_loader_takes_counts() -> None:
    rate = measure(job(), 0, 1)
    assert rate is not None
    assert 0.0 < rate <= ROWS / LOAD_S


def test_an_interrupt_at_its_start_and_one_at_its_end_leave_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, kill, forked, open_files = os.fork, os.kill, list[int](), len(os.listdir("/proc/self/fd"))

    def interrupted() -> int:
        forked.append(fork())
        if forked[0]:
            give(aside, signal.SIGINT)
        return forked[0]

    def ends(pid: int, number: int) -> None:
        give(aside, signal.SIGINT)
        kill(pid, number)

    monkeypatch.setattr(os, "fork", interrupted)
    monkeypatch.setattr(os, "kill", ends)
    with bystander() as aside, handled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        measure(job(), 0, 1)
    assert not alive(forked[0])
    assert len(os.listdir("/proc/self/fd")) == open_files
