"""Runs checks, each in a process of its own with a time limit, and judges what they told."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.gpu.first_look import told
from benchmarks.gpu.first_look.checks import Check

ROOT = Path(__file__).parents[3]
LEAST_S = 5.0
"""A check is not begun with less time than this."""

MANY_CORES, CORES_EACH, MOST_AT_ONCE = 8, 3, 5
"""On a machine with so many cores checks that measure nothing run several at once, each on so many cores."""

ROW, LINE = 300, 700
"""Characters of a printed row, and of a line below it."""

HOLDS, FAILS, SKIPPED, FIGURE = "holds", "FAILS", "skipped", "figure"


THROUGH = "FIRST_LOOK_THROUGH"
"""The variable that tells a check's process of `Setting.through`."""


class Process(Protocol):
    """A check's process, which leads a group of its own."""

    pid: int

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it has not ended by then."""
        ...


@dataclass(frozen=True)
class Result:
    """How a check ended.

    Args:
        name: of the check.
        verdict: `holds`, `FAILS`, `skipped` or `figure`.
        seconds: that it took.
        code: its exit code; None if it was cut off, or never begun.
        why: why it was cut off or not begun; how it ended.
        told: everything that it told.
        printed: everything that it printed.
    """

    name: str
    verdict: str
    seconds: float = 0.0
    code: int | None = None
    why: str = ""
    told: Sequence[dict[str, Any]] = field(default_factory=tuple)
    printed: str = field(default="", repr=False)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """What it told of one kind."""
        return [one for one in self.told if one["kind"] == kind]

    def lines(self) -> Iterator[str]:
        """The row of the table, then what is to be said in addition; `first_look.json` has all words whole."""
        yield told.shortened(f"{self.name}: {self.verdict}, {self.seconds:.0f} s; {self._summary()}", ROW)
        yield from (f"      {told.shortened(line, LINE)}" for line in self._more())

    def _more(self) -> Iterator[str]:
        yield from (f"FAILS: {one['words']}" for one in self.of("fails"))
        for case in self.of("case"):
            if case["state"] in ("odd", "skipped"):
                yield f"{case['name']}: {'' if case['state'] == 'odd' else 'skipped, '}{case['words']}"
        if figures := [f"{one['name']} {one['value']:.6g} {one['unit']}" for one in self.of("figure")]:
            yield "; ".join(figures)
        yield from (one["words"] for one in self.of("note") if one["words"])

    def _summary(self) -> str:
        words = [self.why] if self.why else []
        words += [one["words"] for one in self.of("skipped")]
        if self.of("cases"):
            words.append(_of_cases(self.of("cases")[0]["total"], self.of("case")))
        words += [one["words"] for one in self.of("holds")]
        return "; ".join(words)

    def as_json(self) -> dict[str, Any]:
        """Everything, for `first_look.json`."""
        about = {"name": self.name, "verdict": self.verdict, "seconds": round(self.seconds, 2), "code": self.code}
        figures = [{key: one[key] for key in ("name", "value", "unit")} for one in self.of("figure")]
        cases = [{key: value for key, value in one.items() if key != "kind"} for one in self.of("case")]
        words = {kind: [one["words"] for one in self.of(kind)] for kind in ("holds", "fails", "skipped", "note")}
        return {**about, "words": self._summary(), "figures": figures, "cases": cases, **words}


def _of_cases(total: int, cases: Sequence[dict[str, Any]]) -> str:
    """How many cases ended how, and how many were compared with plain PyTorch."""
    states = Counter(case["state"] for case in cases)
    words = [f"{states['equal']} of {total} equal"]
    names = {"refused": "refused as they must be", "found": "faults on purpose found", "odd": "ODD"}
    words += [f"{states[state]} {name}" for state, name in names.items() if states[state]]
    if states["skipped"]:
        words.append(f"{states['skipped']} skipped")
    compared = Counter(case["fidelity"] for case in cases if case["fidelity"])
    if compared:
        how = ", ".join(
            f"{count} {'equal' if one == 'equal' else f'not checked ({one})'}" for one, count in compared.most_common(3)
        )
        words.append(f"captured = plain PyTorch: {how}")
    return ", ".join(words)


@dataclass(frozen=True)
class Setting:
    """How checks are run.

    Args:
        kind: `cuda` or `cpu`.
        tiny: sizes of a rehearsal.
        logs: folder for what the checks print while they run.
        until: when all time is used up, of `time.monotonic`.
        limit_s: in place of every check's own limit.
        fault: planted in every check's process.
        forks: processes are forked from this one, which has loaded everything.
        through: a module that runs all others, `python -m THROUGH -m MODULE ...`: a stand-in for a device.
    """

    kind: str
    tiny: bool
    logs: Path
    until: float
    limit_s: float | None = None
    fault: str = ""
    forks: bool = False
    through: str = ""

    def log(self, name: str) -> Path:
        """The file of what a check prints."""
        return self.logs / (re.sub(r"\W+", "_", name) + ".txt")


def run_all(setting: Setting, checks: Sequence[Check]) -> Iterator[Result]:
    """Run checks in their order; on many cores those first that may run beside others, several at once.

    Yields:
        Each result as its check ends.
    """
    cores = len(os.sched_getaffinity(0))
    if cores < MANY_CORES or setting.forks:
        yield from (run_one(setting, check, cores) for check in checks)
        return
    at_once = min(MOST_AT_ONCE, cores // CORES_EACH)
    with ThreadPoolExecutor(at_once) as pool:
        begun = [pool.submit(run_one, setting, check, cores // at_once) for check in checks if not check.alone]
        yield from (one.result() for one in as_completed(begun))
    yield from (run_one(setting, check, cores) for check in checks if check.alone)


def run_one(setting: Setting, check: Check, cores: int = 1) -> Result:
    """Run one check to its end, or to its limit, or until all time is used up."""
    left = setting.until - time.monotonic()
    limit = min(setting.limit_s or check.limit_s, left)
    if left < LEAST_S:
        return Result(check.name, SKIPPED, why="no time was left")
    log, began = setting.log(check.name), time.monotonic()
    process = _forked(setting, check, log) if setting.forks else _spawned(setting, check, log, cores)
    code = process.wait(limit)
    with suppress(ProcessLookupError):  # and whatever it has started
        os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        process.wait(LEAST_S)
    seconds, printed = time.monotonic() - began, log.read_text(errors="replace")
    return judged(check.name, seconds, code, printed, out_of_time=code is None and limit == left)


def judged(name: str, seconds: float, code: int | None, printed: str, *, out_of_time: bool = False) -> Result:
    """The result of a check that printed this.

    Args:
        name: of the check.
        seconds: that it took.
        code: its exit code; None if it was cut off.
        printed: its log.
        out_of_time: it was cut off as all time was used up, and not at its own limit.
    """
    found = told.read(printed)
    kinds = {one["kind"] for one in found}
    odd = "fails" in kinds or any(one["kind"] == "case" and one["state"] == "odd" for one in found)
    why = ""
    if code is None:
        last = next((f" in: {one['words']}" for one in reversed(found) if one["kind"] == "begins"), "")
        why = f"{'no time was left' if out_of_time else 'cut off'} after {seconds:.0f} s{last}"
    elif code and "fails" not in kinds:
        why = f"ended with {code}: {told.shortened(_last_line(printed), 300)}"
    if odd or (code and not out_of_time) or (code is None and not out_of_time):
        verdict = FAILS
    elif code is None:
        verdict = SKIPPED
    elif "holds" in kinds or any(one["kind"] == "case" and one["state"] != "skipped" for one in found):
        verdict = HOLDS
    else:
        verdict = FIGURE if "figure" in kinds else SKIPPED
    return Result(name, verdict, seconds, code, why, found, printed)


def _last_line(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip() and not line.startswith(told.MARK)]
    return lines[-1] if lines else "it printed nothing"


class _Spawned:
    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid, self._popen = popen.pid, popen

    def wait(self, seconds: float) -> int | None:
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


def _spawned(setting: Setting, check: Check, log: Path, cores: int) -> Process:
    """A process of a new interpreter."""
    size = "tiny" if setting.tiny else "full"
    through = [setting.through, "-m"] if setting.through else []
    module = [sys.executable, "-W", "ignore", "-m", *through, "benchmarks.gpu.first_look.child"]
    with log.open("wb") as file:
        popen = subprocess.Popen(
            [*module, check.name, setting.kind, size, *([setting.fault] if setting.fault else [])],
            env=os.environ | environment(check.alone, cores) | {THROUGH: setting.through},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Spawned(popen)


def environment(alone: bool, cores: int) -> dict[str, str]:
    """What a check's process needs."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_NUM_THREADS": str(max(1, cores)) if alone else "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


class _Forked:
    def __init__(self, process: Any) -> None:
        self.pid, self._process = process.pid, process

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


def _forked(setting: Setting, check: Check, log: Path) -> Process:
    """A process forked from this one."""
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(setting, check, log))
    process.start()
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(process.pid, process.pid)
    return _Forked(process)


def _in_child(setting: Setting, check: Check, log: Path) -> None:
    from benchmarks.gpu.first_look import child
    from benchmarks.gpu.first_look.place import Place

    with suppress(PermissionError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    code = child.check(check.name, Place(setting.kind, setting.tiny), setting.fault)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
