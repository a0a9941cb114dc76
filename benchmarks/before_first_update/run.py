"""What comes before the first update: seconds and memory of capture and planning, beside plain training of the job.

For every job of ``jobs/``, each in processes of its own: the first five updates in plain PyTorch;
``roundelay.capture(job)`` alone; and ``roundelay train`` up to its first update, without options, and on one worker
with 1 and 4 micro-batches. All compute on every core. Memory is the largest sum of what the processes of the tree have
for themselves (Private_Clean and Private_Dirty of ``smaps_rollup``), looked at every 20 ms; torch's libraries and the
weights are in it. Seconds are those of the updates, of the capture, and of the whole command; behind them how many
times plain training's the memory is, and, of the whole command less its imports, the seconds.

    .venv/bin/python -m benchmarks.before_first_update.run [--jobs NAME ...] [--ways NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import roundelay
from benchmarks.common import machine, table
from roundelay.frontend.export.export_adapter import default_inputs
from roundelay.planning.job_file import load_job

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
JOBS = sorted(path.stem for path in (HERE / "jobs").glob("*.py"))
UPDATES = 5
LOOK_S = 0.02
LIMIT_S = 600.0
MIB = 1 << 20


def plain(job: roundelay.Job) -> float:
    """Seconds of the first updates in plain PyTorch."""
    optimizer: Any = job.optimizer(list(job.model.named_parameters()))
    start = time.perf_counter()
    for _, batch in zip(range(UPDATES), (batch for _ in range(UPDATES) for batch in job.batches(0)), strict=False):
        args, kwargs = (job.inputs or default_inputs)(batch)
        optimizer.zero_grad()
        loss: Any = job.loss(job.model.train()(*args, **kwargs), batch)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


def capture(job: roundelay.Job) -> float:
    """Seconds of a capture."""
    start = time.perf_counter()
    roundelay.capture(job)
    return time.perf_counter() - start


INNER: dict[str, Callable[[roundelay.Job], float]] = {"plain": plain, "capture": capture}
TRAIN = {"no options": (), **{f"1 worker, M = {m}": ("--workers", "1", "--micro-batches", str(m)) for m in (1, 4)}}
WAYS = (*INNER, *TRAIN)


def private_bytes(pid: str) -> int:
    """Bytes that a process and all below it have for themselves."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in _children(task)]
    except OSError:  # it has ended
        return 0
    own = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
    return own * 1024 + sum(map(private_bytes, children))


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def measured(command: list[str], folder: str, ended: Callable[[], bool]) -> tuple[float, int]:
    """Seconds of a command and the peak of its memory, until it has ended or the function says so."""
    start, peak = time.perf_counter(), 0
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = kept | {"ROUNDELAY_CACHE": "none"}  # else operations are measured once
    log = Path(folder) / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        while process.poll() is None and not ended():
            peak = max(peak, private_bytes(str(process.pid)))
            if time.perf_counter() - start > LIMIT_S:
                raise SystemExit(f"{' '.join(command)}: not done after {LIMIT_S:.0f} s")
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - start
        if process.poll():
            raise SystemExit(f"{' '.join(command)}: ended with {process.returncode}\n{log.read_text()}")
        return seconds, peak
    finally:
        process.terminate()
        process.wait()


def inside(way: str, job: str) -> tuple[float, int]:
    """Seconds and bytes of what one process does with a job."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        command = [sys.executable, "-m", __spec__.name, "--inner", way, "--jobs", job, "--result", str(result)]
        _, peak = measured(command, folder, lambda: False)
        return float(json.loads(result.read_text())), peak


def typed(job: str, options: Sequence[str]) -> tuple[float, int]:
    """Seconds and bytes of ``roundelay train`` up to the first update."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "roundelay", "train", str(HERE / "jobs" / f"{job}.py"), *options]
        command += ["--steps", "1000", "--no-baseline", "--out", str(told.parent)]
        return measured(command, folder, lambda: told.exists() and told.stat().st_size > 0)


def imports(job: str) -> float:
    """Seconds of what any program with such a job imports: torch, Roundelay, and what the job's file does."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"import runpy, roundelay.cli.train_command; runpy.run_path({str(HERE / 'jobs' / f'{job}.py')!r})"
        return min(measured([sys.executable, "-c", program], folder, lambda: False)[0] for _ in range(3))


def row(job: str, ways: Sequence[str]) -> list[str]:
    """The job's line of the table."""
    seconds, peak = inside("plain", job)
    base = imports(job)
    found = [job, f"{base:.1f} s", f"{seconds:.1f} s, {peak / MIB:.0f} MiB"]
    for way in ways:
        own_s, own_peak = typed(job, TRAIN[way]) if way in TRAIN else inside(way, job)
        times = f" ({(own_s - base) / seconds:.1f} x)" if way in TRAIN else ""
        found.append(f"{own_s:.1f} s{times}, {own_peak / MIB:.0f} MiB ({own_peak / peak:.2f} x)")
    return found


def main() -> None:
    """Measure every job in every way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:])
    parser.add_argument("--short", action="store_true", help="the smallest job without options")
    parser.add_argument("--anyway", action="store_true", help="memory does not depend on how busy the machine is")
    parser.add_argument("--inner", choices=INNER)
    parser.add_argument("--result", type=Path)
    what = parser.parse_args()
    if what.inner:
        job = load_job(HERE / "jobs" / f"{what.jobs[0]}.py", 0)
        what.result.write_text(json.dumps(INNER[what.inner](job)))
        return
    jobs, ways = (["linears"], ["no options"]) if what.short else (what.jobs, what.ways)
    rows = []
    for job in jobs:
        rows.append(row(job, ways))
        print("\t".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(["", "imports", "plain", *ways], rows))
    print(f"\n{machine()}; {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()
