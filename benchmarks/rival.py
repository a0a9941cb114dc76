"""torch.distributed.pipelining, run as its documentation shows: one forked process per stage, gloo on loopback."""

from __future__ import annotations

import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

#: name to the schedule, and to the stages that each rank holds of D ranks
SCHEDULES: dict[str, tuple[Any, Callable[[int, int], list[int]]]] = {
    "GPipe": (ScheduleGPipe, lambda rank, size: [rank]),
    "1F1B": (Schedule1F1B, lambda rank, size: [rank]),
    "InterleavedZB": (ScheduleInterleavedZeroBubble, lambda rank, size: [rank, rank + size]),
    "ZBV": (ScheduleZBVZeroBubble, lambda rank, size: [rank, 2 * size - 1 - rank]),
}

Module = Callable[[int, int], nn.Module]
"""(stage, number of stages) to its module."""


def run(schedule: str, size: int, micro_batches: int, steps: int, width: int, module: Module) -> list[dict[str, Any]]:
    """Train one step to warm up, then ``steps``; for each rank the times at which steps ended, and CPU seconds.

    Both count from the end of the first step. No barrier stands between the steps: a rank begins its next step as soon
    as it is done, as in real training.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    torch.set_num_threads(1)
                    found = _rank(rank, size, Path(folder), SCHEDULES[schedule], (micro_batches, steps, width), module)
                    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
                    status = 0
                finally:
                    os._exit(status)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(codes), f"a rank of torch's {schedule} failed: {codes}"
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _rank(
    rank: int, size: int, folder: Path, how: tuple[Any, Any], sizes: tuple[int, int, int], module: Module
) -> dict[str, Any]:
    micro_batches, steps, width = sizes
    kind, placed = how
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    held = placed(rank, size)
    count = size * len(held)
    stages = [PipelineStage(module(k, count), k, count, torch.device("cpu")) for k in held]
    optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=1e-3) for stage in stages]
    loss = nn.functional.mse_loss
    runner = kind(stages if len(stages) > 1 else stages[0], micro_batches, loss_fn=loss)
    x, y = torch.randn(4 * micro_batches, width), torch.randn(4 * micro_batches, width)
    ends, cpu = [], 0.0
    for step in range(steps + 1):
        args = (x,) if 0 in held else ()
        runner.step(*args, **({"target": y, "losses": []} if count - 1 in held else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            cpu = _cpu()
        ends.append(time.perf_counter())
    found = {"ends": ends, "cpu_s": _cpu() - cpu}
    dist.barrier()
    dist.destroy_process_group()
    return found


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
