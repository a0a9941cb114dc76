"""What a loss writes into a file while a job is planned and checked goes nowhere: a log holds the run's calls."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundelay

STEPS, PARTS = 3, 2


def job(loss: Any) -> roundelay.Job:
    data = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(STEPS)]
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=loss,
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize("kind", ["text", "csv"])
def test_a_log_holds_one_line_for_each_call_of_the_run(kind: str, flushes: bool, tmp_path: Path) -> None:
    with (tmp_path / "log.csv").open("w") as log:
        log.write("begin\n")
        writer = csv.writer(log)
        flush = log.flush if flushes else lambda: None

        def as_text(outputs: Any, batch: Any) -> torch.Tensor:
            log.write("line\n")
            flush()
            return functional.cross_entropy(outputs, batch[1])

        def as_csv(outputs: Any, batch: Any) -> torch.Tensor:
            writer.writerow(["line"])
            flush()
            return functional.cross_entropy(outputs, batch[1])

        made = job(as_text if kind == "text" else as_csv)
        roundelay.train(made, steps=STEPS, workers=2, micro_batches=PARTS, cuts="equal", check="full")
        log.write("end\n")
    lines = (tmp_path / "log.csv").read_text().split()
    assert lines == ["begin", *["line"] * STEPS * PARTS, "end"]


def test_a_file_that_may_be_read_too_is_read_in_trials(tmp_path: Path) -> None:
    """A database, or shared memory: its descriptor allows both."""
    (tmp_path / "scales").write_bytes(b"2")
    with (tmp_path / "scales").open("r+b", buffering=0) as scales:

        def loss(outputs: Any, batch: Any) -> torch.Tensor:
            scale = float(os.pread(scales.fileno(), 1, 0))
            return functional.cross_entropy(outputs, batch[1]) * scale

        assert roundelay.verify(job(loss), steps=2, workers=2, micro_batches=PARTS, cuts="equal").equal
