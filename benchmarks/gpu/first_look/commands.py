"""Checks of programs: versions, the tests of the GPU, the words of errors, Ctrl-C, launching."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.first_look import plants, told
from benchmarks.gpu.first_look.place import Place
from benchmarks.gpu.first_look.runner import THROUGH

ROOT = Path(__file__).parents[3]
JOB = str(Path(__file__).with_name("job_file.py"))
NEEDED = ("numpy", "safetensors", "psutil", "msgspec", "tomli_w", "typer", "rich")
WANTED = ("pytest", "hypothesis", "transformers", "torchvision", "triton")
PANEL = ("got", "expected", "do")
"""What every refusal says."""

INTERRUPTED = 130


@dataclass(frozen=True)
class Ended:
    """A program that has ended: its exit code (None: it was killed at its limit), seconds, and what it printed."""

    code: int | None
    seconds: float
    out: str
    err: str

    def first_words(self, lines: int = 8) -> str:
        """The first lines of stderr, or of stdout where there are none, without
        frames and bars of progress."""
        text = self.err.strip() or self.out.strip()
        clean = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
        return " ¦ ".join([line for line in clean if line and "━" not in line][:lines])


def module(*words: str) -> list[str]:
    """The command of a module's program, with this process's fault if it has one."""
    return [sys.executable, "-W", "ignore", "-m", *inner(*words)]


def inner(*words: str) -> list[str]:
    """The same behind a `-m` of another program's."""
    through = os.environ.get(THROUGH, "")
    fault = ["benchmarks.gpu.first_look.planted", plants.planted] if plants.planted else []
    return [*([through, "-m"] if through else []), *fault, *words]


def environment(place: Place, network: str = "") -> dict[str, str]:
    """Of the programs that are started here."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NO_COLOR": "1",
        "COLUMNS": "160",
        "OMP_NUM_THREADS": "1",
        "FIRST_LOOK_NETWORK": network,
        "FIRST_LOOK_TINY": "1" if place.tiny else "0",
    }


def run(command: Sequence[str], place: Place, network: str = "", limit_s: float = 90.0) -> Ended:
    """Run a program to its end, or to its limit."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment(place, network),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = None
    print("$", *command, "\n", out, "\n", err, "\n", code, flush=True)  # for the log
    return Ended(code, time.monotonic() - began, out, err)


def versions(place: Place) -> None:
    """Python, torch, the device, what is not installed, and what `roundelay doctor` finds."""
    build = torch.version.cuda or "no CUDA"
    told.note(f"Python {platform.python_version()}, torch {torch.__version__} ({build})")
    told.figure("cores", os.cpu_count() or 0, "cores")
    told.figure("devices", torch.cuda.device_count(), "devices")
    if place.cuda:
        properties = torch.cuda.get_device_properties(0)
        nccl = torch.cuda.nccl.version() if torch.version.cuda else "none"
        told.note(f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, NCCL {nccl}")
        told.note(f"driver {_driver()}")
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    told.bar(not absent, f"packages that roundelay needs: {'missing ' + ', '.join(absent) if absent else 'all here'}")
    if less := [name for name in WANTED if importlib.util.find_spec(name) is None]:
        told.note(f"not here, and wanted by some checks: {', '.join(less)}")
    told.begins("roundelay doctor")
    ended = run(module("roundelay", "doctor", "--json"), place)
    told.bar(ended.code == 0, f"doctor ends with {ended.code}")
    try:
        findings = json.loads(ended.out)["checks"]
    except (ValueError, KeyError):
        told.fails(f"doctor: {ended.first_words()}")
        return
    for finding in findings:
        if finding["state"] != "ok":
            told.note(f"doctor, {finding['state']}: {finding['name']}: {finding['found']}")


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not known: no nvidia-smi"
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,power.limit", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return (answer.stdout or answer.stderr).strip()


def gpu_tests(place: Place) -> None:
    """tests/gpu by pytest; in a rehearsal the tests of streams with a stand-in driver."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        told.skipped("pytest or hypothesis, which tests/conftest.py loads, is not here")
        return
    which = "tests/gpu" if place.cuda else "tests/runtime/test_device.py"
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"  # without the settings of plugins that may be missing
        settings.write_text(f"[pytest]\npythonpath = {ROOT} {ROOT / 'src'}\nconsider_namespace_packages = true\n")
        words = ["-c", str(settings), "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider"]
        shown = ["-q", "-rA", "--tb=short", "-W", "default"]
        ended = run(module("pytest", *words, *shown, str(ROOT / which)), place, limit_s=200)
    lines = ended.out.splitlines()
    for state in ("passed", "skipped", "failed", "error"):
        key = {"passed": "PASSED", "skipped": "SKIPPED", "failed": "FAILED", "error": "ERROR"}[state]
        told.figure(state, sum(line.startswith(key + " ") for line in lines), "tests")
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            told.fails(line)
        elif line.startswith("SKIPPED "):
            told.note(line)
    told.bar(ended.code == 0, f"pytest {which} ends with {ended.code}: {lines[-1] if lines else ended.first_words()}")


def _train(place: Place, folder: str, *words: str) -> list[str]:
    devices = ["--devices", place.names(2)]
    quiet = ["--check", "off", "--no-baseline", "--out", str(Path(folder) / "run")]
    return module("roundelay", "train", JOB, "--workers", "2", "--rule", "pipeoptim", *devices, *quiet, *words)


def _told_in_words(place: Place, network: str, needles: Sequence[str]) -> None:
    """A run that must end with an error that says what is wrong, and not by a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run(_train(place, folder, "--steps", "20"), place, network)
    words = ended.first_words()
    told.note(f"exit code {ended.code} after {ended.seconds:.0f} s: {words}")
    told.bar(ended.code == 1, f"exit code {ended.code}, expected 1")
    told.bar("Traceback" not in ended.err and all(word in ended.err for word in PANEL), "a panel, no traceback")
    told.bar(any(needle in ended.err.lower() for needle in needles), f"says one of {', '.join(needles)}")


def out_of_memory(place: Place) -> None:
    """An activation that does not fit."""
    if not place.cuda:
        told.skipped("no CUDA device")
        return
    _told_in_words(place, "too large", ("out of memory",))


def wrong_label(place: Place) -> None:
    """A class that does not exist, in the seventh batch."""
    _told_in_words(place, "wrong label", ("out of bounds", "assert", "label", "target"))


def ctrl_c(place: Place) -> None:
    """An interrupt in mid-work: seconds until the end, and the exit code."""
    patience = 8.0 if place.tiny else 30.0
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                _train(place, folder, "--steps", "1000000"),
                env=environment(place, "mlp" if place.tiny else "attention"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                begun = _begun(process, Path(folder) / "run" / "metrics.jsonl", 60.0)
                told.begins("the interrupt")
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                code: int | None = process.wait(patience)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                process.kill()
                process.wait()
        seconds, words = time.monotonic() - began, Ended(0, 0.0, log.read_text(), "").first_words(6)
    told.note(words)
    if not begun:
        told.fails(f"no update within 60 s or before its end, with exit code {code}")
        return
    told.figure("until the end", seconds, "s")
    told.bar(code == INTERRUPTED, f"exit code {'none, still running' if code is None else code} after {seconds:.1f} s")


def _begun(process: subprocess.Popen[bytes], metrics: Path, limit_s: float) -> bool:
    """Wait for the first updates of a run."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and process.poll() is None:
        if metrics.exists() and metrics.stat().st_size:
            time.sleep(1.0)
            return process.poll() is None
        time.sleep(0.1)
    return False


def launching(place: Place) -> None:
    """torchrun with two processes on one device, a run without options, `shm` with devices."""
    with told.part("train without options"), tempfile.TemporaryDirectory() as folder:
        words = ["--steps", "4", "--no-baseline", "--out", str(Path(folder) / "run")]
        ended = run(module("roundelay", "train", JOB, *words), place, "mlp")
        told.bar(ended.code == 0, f"train without options ends with {ended.code}")
        if ended.code:
            told.note(ended.first_words())
        else:
            plan = tomllib.loads((Path(folder) / "run" / "plan.toml").read_text())
            told.note("train without options: " + _devices_of(plan))
    for transport in ("nccl", "gloo") if place.cuda else ("gloo",):
        with told.part(f"torchrun {transport}"), tempfile.TemporaryDirectory() as folder:
            _launched(place, transport, str(Path(folder) / "run"))
    with told.part("shm with cuda"):
        devices = ["--workers", "2", "--transport", "shm", "--devices", "cuda:0,cuda:0"]
        ended = run(module("roundelay", "verify", JOB, *devices), place, "mlp")
        refused = ended.code == 2 and all(word in ended.err for word in PANEL) and "Traceback" not in ended.err
        told.bar(refused, f"shm with cuda ends with {ended.code}: {ended.first_words(4)}")


def _launched(place: Place, transport: str, out: str) -> None:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    local = ["--rdzv-endpoint", "127.0.0.1:0", "-m"]
    train = ["roundelay", "train", JOB, "--workers", "2", "--rule", "1f1b", "--transport", transport]
    rest = ["--devices", place.names(2), "--steps", "4", "--check", "off", "--no-baseline", "--out", out]
    ended = run([sys.executable, "-W", "ignore", "-m", *launcher, *local, *inner(*train, *rest)], place, "mlp")
    in_words = all(word in ended.err for word in PANEL)
    said = "" if ended.code == 0 else f": {ended.first_words()}"
    right = ended.code == 0 or (place.cuda and in_words)  # two processes on one device may be refused
    told.bar(right, f"torchrun, {transport}: ends with {ended.code}{said}")


def _devices_of(plan: dict[str, Any]) -> str:
    """How many workers a plan has, and their devices."""
    workers = plan.get("workers", [])
    return f"{len(workers)} workers on {', '.join(worker['device'] for worker in workers)}"
