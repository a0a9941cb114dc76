"""`roundelay host` on the first peer of a test bed, `roundelay join` on the others, as typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.wan.bed import ROOT, Bed

COMMAND = [sys.executable, "-m", "roundelay"]
OPEN_S, END_S, LEAVE_S, TICK_S = 120.0, 200.0, 30.0, 0.1

_INVITATION = re.compile(r"roundelay join (\S+)")


@dataclass(frozen=True, slots=True)
class Hosted:
    """What a run has left.

    Args:
        folder: of the run.
        said: by the host.
    """

    folder: Path
    said: str

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary."""
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def plan(self) -> dict[str, Any]:
        """Its plan."""
        return tomllib.loads((self.folder / "plan.toml").read_text())

    @property
    def updates(self) -> list[dict[str, Any]]:
        """Its updates."""
        return [line for line in self._lines() if "loss" in line and "update" in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """What the job's `evaluate` said."""
        return [line for line in self._lines() if "evaluation" in line]

    def letters(self) -> list[str]:
        """What each stage did, a letter for each forward and backward, if its order was free."""
        stages = len(self.plan["stages"])
        texts = [(self.folder / "trace" / f"stage-{k}.txt").read_text() for k in range(stages)]
        return ["".join(line for line in text.splitlines() if line and not set(line) - {*"FB"}) for text in texts]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def hosted(
    bed: Bed, peers: int, job: Path, out: Path, options: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Hosted:
    """Train a job on all peers of a bed.

    Args:
        bed: entered.
        peers: of it.
        job: the job file.
        out: the run's folder.
        options: of `roundelay host`.
        env: variables that the job file reads.
    """
    said = out.with_suffix(".txt")
    given = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "env": {**os.environ, **(env or {})}}
    typed = ["host", str(job), "--peers", str(peers), "--listen", bed.address(0), "--out", str(out), *options]
    with said.open("w") as file:
        host = bed.popen(0, [*COMMAND, *typed], stderr=file, **given)
        invitations = _invitations(said, peers - 1, host)
        joined = [
            bed.popen(k, [*COMMAND, "join", text, "--listen", bed.address(k)], stderr=subprocess.DEVNULL, **given)
            for k, text in enumerate(invitations, 1)
        ]
        code = host.wait(END_S)
    codes = [process.wait(LEAVE_S) for process in joined]
    if code or any(codes):
        raise RuntimeError(f"host and joiners ended with {code} and {codes}: {said.read_text()}")
    return Hosted(out, said.read_text())


def _invitations(said: Path, count: int, host: subprocess.Popen[Any]) -> list[str]:
    until = time.monotonic() + OPEN_S
    while time.monotonic() < until and host.poll() is None:
        if len(found := _INVITATION.findall(said.read_text())) == count:
            return found
        time.sleep(TICK_S)
    raise RuntimeError(f"no {count} invitations within {OPEN_S:g} s: {said.read_text()}")


def staleness(own: str) -> list[int]:
    """Of each micro-batch the updates between its forward and its own backward, by a stage's letters."""
    begun: list[int] = []
    found: list[int] = []
    for letter in own:
        if letter == "F":
            begun.append(len(found))
        else:
            found.append(len(found) - begun.pop(0))
    return found
