"""What holds for every test: one thread, one seed, nothing left running.

Torch keeps to one thread, in processes that tests start too, as on a machine of two cores whose user has said so: the
suite's workers share few cores, and a test means the same on every machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.sampling import LONG, SAMPLE, chosen, turn_of_commit

SEED = 20240229
#: Seconds that a child or a thread has to end by itself after its test.
GRACE = 5.0

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ROUNDELAY_CORES", "2")
os.environ.setdefault("ROUNDELAY_RUNS", "none")
torch.set_num_threads(1)

# The same examples on every machine, however busy: a slow minute is no failure.
settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def children() -> dict[str, str]:
    """Every live or unreaped child process: what tells it from any other, and how to show it.

    ``/proc`` knows the children that multiprocessing does not; where there is none, multiprocessing must do.
    multiprocessing's own resource tracker lives as long as we do and is not counted.
    """
    tasks = list(Path("/proc/self/task").glob("*/children"))
    if not tasks:
        return {str(child.pid): child.name for child in multiprocessing.active_children()}
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    pids = {pid for task in tasks for pid in _read(task).split()} - {str(tracker)}
    return {
        pid: " ".join(_read(Path(f"/proc/{pid}/cmdline")).split("\0")).strip() or "ended, not reaped" for pid in pids
    }


def _read(path: Path) -> str:
    """The file's text, or nothing where its process or thread has just ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def threads() -> dict[str, str]:
    """Every live thread that would keep the interpreter from ending, the calling one apart."""
    others = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return {f"thread {thread.ident}": thread.name for thread in others if not thread.daemon}


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


def running() -> dict[str, str]:
    """Every child process and non-daemon thread of ours."""
    return {f"process {pid}": what for pid, what in children().items()} | threads()


@contextmanager
def nothing_left_behind(grace: float = GRACE) -> Iterator[None]:
    """Fails when the block ends and, ``grace`` seconds later, something that it started still runs."""
    before = running().keys()
    yield
    deadline = time.monotonic() + grace
    while (left := {key: what for key, what in running().items() if key not in before}) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        listing = ", ".join(f"{key} ({what})" for key, what in sorted(left.items()))
        pytest.fail(f"left behind: {listing}; expected every process joined and every thread ended", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured once is kept for the whole session, so that a job planned twice is cut twice in the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROUNDELAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing_behind() -> Iterator[None]:
    """Holds fixtures that outlive a test to the same rule."""
    with nothing_left_behind():
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(session_leaves_nothing_behind: None) -> Iterator[None]:
    """Set up before the test's own fixtures, so torn down after them."""
    with nothing_left_behind():
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whichever tests ran before."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--sample``: see :mod:`tests.sampling`."""
    parser.addoption("--sample", action="store_true", help="run the sample of the tests that `make test` runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the sample, and begin with what takes long."""
    if not config.getoption("--sample"):
        return
    keep = chosen([item.nodeid for item in items], json.loads(SAMPLE.read_text(encoding="utf-8")), turn_of_commit())
    left_out = [item for item, kept in zip(items, keep, strict=True) if not kept]
    items[:] = [item for item, kept in zip(items, keep, strict=True) if kept]
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    config.hook.pytest_deselected(items=left_out)
