"""A machine whose line is cut in the middle of a hosted run is told by name, by itself and by the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.harness import MLP, PROGRAM, ROOT
from tests.conftest import nothing_left_behind
from tests.wan.bed import Bed, Unusable

PATIENCE_S, TOLD_S = 90.0, 6.0
INVITATION = re.compile(r"roundelay-1-[a-z2-7]+")


@pytest.mark.timeout(300)
def test_a_machine_that_is_cut_off_is_told_on_both_sides_of_the_cut(tmp_path: Path) -> None:
    try:
        with nothing_left_behind(), Bed(peers=3, mbit_per_s=100, rtt_ms=40) as bed:
            _cut(bed, tmp_path)
    except Unusable as error:
        pytest.skip(str(error))


def _cut(bed: Bed, folder: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(MLP).parent)])}
    logs = [folder / f"machine-{peer}.log" for peer in range(3)]

    def type_in(peer: int, *words: object) -> None:
        with logs[peer].open("w") as log:
            argv = [sys.executable, "-c", PROGRAM, *map(str, words), "--listen", bed.address(peer)]
            processes.append(bed.popen(peer, argv, cwd=folder, env=env, stdout=log, stderr=log))

    def until(holds: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, [log.read_text() for log in logs if log.exists()]
            time.sleep(0.02)

    processes: list[subprocess.Popen[Any]] = []
    type_in(0, "host", MLP, "--peers", 3, "--steps", 1_000_000, "--out", "R")
    until(lambda: len(INVITATION.findall(logs[0].read_text())) == 2, PATIENCE_S)
    for peer, invitation in enumerate(INVITATION.findall(logs[0].read_text()), 1):
        type_in(peer, "join", invitation)
    metrics = folder / "R" / "metrics.jsonl"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 20, PATIENCE_S)
    bed.cut(1)
    begin, took = time.monotonic(), dict[int, float]()

    def all_told() -> bool:
        for peer in range(3):
            if "lost: " in logs[peer].read_text():
                took.setdefault(peer, time.monotonic() - begin)
        return len(took) == 3

    until(all_told, TOLD_S)
    codes = [process.wait(PATIENCE_S) for process in processes]
    assert codes == [1, 1, 1]
    for peer, who in ((0, "worker-1"), (1, "host"), (2, "worker-1")):
        told = [line for line in logs[peer].read_text().splitlines() if line.startswith("lost: ")]
        assert [line.startswith(f"lost: {who}: ") for line in told] == [True], told
        assert "Traceback" not in logs[peer].read_text()
