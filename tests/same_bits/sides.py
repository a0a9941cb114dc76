"""The two sides of the comparison: each a source tree, whose jobs run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, final

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
"""Seconds that one job may take."""

Result = dict[str, Any]
"""What ``jobs.Left`` holds; of a job whose process died, ``failed`` alone."""


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit, as a git worktree in a temporary folder.

    Raises:
        SystemExit: git knows no such commit.
    """
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        place = Path(folder) / "tree"
        made = _git("worktree", "add", "--detach", str(place), commit)
        if made.returncode:
            raise SystemExit(f"no worktree of {commit}: {made.stderr.strip()}")
        try:
            yield place
        finally:
            _git("worktree", "remove", "--force", str(place))


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@final
class Side:
    """Runs jobs with one source tree; a job that takes its process down loses no other job.

    Args:
        source: the folder that holds the package.
        folder: where its jobs work; made.
        numbers: of the jobs, in order.
        done: told of each job's number and result, from a thread.
    """

    def __init__(self, source: Path, folder: Path, numbers: Sequence[int], done: Callable[[int, Result], None]) -> None:
        self._source, self._folder, self._done = source, folder, done
        self._left = list(numbers)
        folder.mkdir()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"jobs of {source}")

    def __enter__(self) -> Side:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is not None:
            self._stopping.set()
        try:
            self._thread.join()
        except BaseException:  # a Ctrl-C
            self._stopping.set()
            self._thread.join()
            raise

    def _run(self) -> None:
        """Start processes until no job is left: one, unless it dies."""
        while self._left and not self._stopping.is_set():
            process = self._start()
            try:
                self._follow(process)
            finally:
                with suppress(ProcessLookupError):  # its group: also workers that it has left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(self._source), str(ROOT)])
        command = [sys.executable, "-W", "ignore", "-m", "tests.same_bits.jobs", str(self._source), str(self._folder)]
        with (self._folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                [*command, *map(str, self._left)],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ROUNDELAY_CORES": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Hand on each result when it is there; give the job up at which the process ends or takes too long."""
        since = time.monotonic()
        while self._left and not self._stopping.is_set():
            ended = process.poll()
            file = self._folder / str(self._left[0]) / "left.json"
            if file.exists():
                self._take(json.loads(file.read_text()))
                since = time.monotonic()
            elif ended is not None:
                self._take({"failed": f"its process ended with {ended}: {self._log()}"})
                return
            elif time.monotonic() - since > LIMIT_S:
                self._take({"failed": f"it took longer than {LIMIT_S:.0f} s"})
                return
            else:
                time.sleep(0.02)

    def _take(self, result: Result) -> None:
        self._done(
            self._left.pop(0), {"digests": {}, "losses": [], "refused": "", "failed": "", "seconds": 0.0} | result
        )

    def _log(self) -> str:
        """The end of what the process has printed."""
        return (self._folder / "log.txt").read_text(errors="replace")[-400:]
