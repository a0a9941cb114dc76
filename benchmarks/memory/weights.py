"""What workers hold of a model whose weights lie in a file: each its own stage.

Eight linear layers of 2048 x 2048, 16 MiB each, built without memory, on four workers: `1f1b`, M = 2, SGD, two rows.
What each worker's process holds privately at the end stands beside what the plan's ledger says, over shared memory and
gloo; as Roundelay sets the C library, and with every tensor from 1 MiB on in pages of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MIB = 2**20
LAYERS, WIDTH, WORKERS = 8, 2048, 4
SETTINGS = {"as `roundelay` sets it": {}, "pages of its own from 1 MiB on": {"MALLOC_MMAP_THRESHOLD_": str(MIB)}}
JOB = f"""
import torch
from torch import nn
import roundelay

def job(seed):
    with roundelay.empty_weights():
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS})))
    return roundelay.Job(
        model=model,
        weights="model.safetensors",
        loss=lambda outputs, batch: (outputs * outputs).mean(),
        batches=lambda epoch: [{{"x": torch.randn(2, {WIDTH})}}] * 100,
        inputs=lambda batch: ((batch["x"],), {{}}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )
"""
COLUMNS = ["transport", "C library", "ledger by worker, MiB", "held by worker, MiB", "held / ledger"]


def trained(folder: Path, transport: str, setting: dict[str, str], steps: int) -> list[dict[str, Any]]:
    """The memory of each worker, as a run's summary tells it."""
    options = ["--workers", str(WORKERS), "--transport", transport, "--rule", "1f1b", "--micro-batches", "2"]
    options += ["--cuts", "roofline", "--steps", str(steps), "--out", "run"]
    subprocess.run(
        [sys.executable, "-m", "roundelay", "train", "job.py", *options],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | setting,
        check=True,
        timeout=300,
        capture_output=True,
    )
    memory: list[dict[str, Any]] = json.loads((folder / "run" / "summary.json").read_text())["memory"]
    return memory


def held(steps: int) -> tuple[list[list[str]], dict[str, Any]]:
    """Rows of a table under :data:`COLUMNS`, and the same as numbers.

    Args:
        steps: updates of each run.
    """
    rows, numbers = [], {}
    for transport in ("shm", "gloo"):
        for name, setting in SETTINGS.items():
            with tempfile.TemporaryDirectory(prefix="memory-") as made:
                folder = Path(made)
                (folder / "job.py").write_text(JOB)
                save_file(
                    {f"{i}.weight": torch.randn(WIDTH, WIDTH) / 50 for i in range(LAYERS)}, folder / "model.safetensors"
                )
                told = trained(folder, transport, setting, steps)
            private = [int(one["private_bytes"]) for one in told]
            ledger = [int(one["predicted"]["total"]) for one in told]
            ratios = sorted(a / b for a, b in zip(private, ledger, strict=True))
            rows.append([transport, name, _mib(ledger), _mib(private), f"{ratios[0]:.2f} to {ratios[-1]:.2f}"])
            numbers[f"{transport}, {name}"] = {"ledger": ledger, "private": private}
    return rows, numbers


def _mib(sizes: list[int]) -> str:
    return " ".join(f"{size / MIB:.0f}" for size in sizes)
