"""What benchmarks of a few processes share: ranks of torch's, and the time from one update of ours to the next."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roundelay import Job, capture, plan
from roundelay.session.training import Length, Session

WARM = 5
"""Updates that do not count."""


def of_two_ranks(measure: Callable[[int], float]) -> float:
    """What a rank measures in a process group: of two forked processes the slower one's."""
    return float(max(of_ranks(measure, 2)))


def of_ranks(measure: Callable[[int], Any], size: int) -> list[Any]:
    """What each of so many forked processes measures in a process group over gloo on loopback, as JSON values."""
    with tempfile.TemporaryDirectory() as folder:
        pids = [_forked(measure, rank, size, Path(folder)) for rank in range(size)]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(codes), f"a rank failed: {codes}"
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(size)]


def _forked(measure: Callable[[int], Any], rank: int, size: int, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
            (folder / str(rank)).write_text(json.dumps(measure(rank)))
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    return pid


def planned(job: Job, steps: int, **choices: object) -> Session:
    """A run of one stage, by 1f1b, with one micro-batch in each replica."""
    captured = capture(job)
    options = {"workers": 1, "rule": "1f1b", "micro_batches": 1} | choices
    return Session(job, captured, plan(job, captured=captured, **options), 0, Length(steps=steps))  # type: ignore[arg-type]


def update_ms(session: Session) -> float:
    """Run it; median milliseconds from one update of the first stage to the next."""
    done = session.run(notify=lambda event: None)
    ends = [event.end_s for event in done.events[0] if event.opcode == "update" and event.stage == 0]
    return statistics.median([1e3 * (b - a) for a, b in zip(ends[WARM:], ends[WARM + 1 :], strict=False)])
