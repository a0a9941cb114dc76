"""A DataLoader's processes: they live as long as their worker, nobody else hears of their end, and errors say why."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import roundelay
from roundelay.errors import UserCodeError
from roundelay.job import Job
from roundelay.runtime.loading.batch_reader import read_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.prefetch import Registers, prefetch
from roundelay.runtime.processes.child_process import fork
from roundelay.runtime.processes.loader_processes import forget_loaders, without_sigchld_handler
from roundelay.runtime.processes.user_errors import loading_failed
from tests.conftest import alive, nothing_left_behind

Row = tuple[torch.Tensor, torch.Tensor]


class Rows(Dataset[Row]):
    """Rows; one of them is asked of ``breaks`` first, which may end its process."""

    def __init__(self, at: int = -1, breaks: Callable[[], object] = bool) -> None:
        self.at, self.breaks = at, breaks

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Row:
        if index == self.at:
            self.breaks()
        return torch.full((6,), index / 64), torch.tensor(index % 3)


@pytest.fixture
def heard() -> Iterator[Any]:
    """The main thread has used a loader, as a job does that looks at its data: torch hears of every loader's end."""
    before, was_set = signal.getsignal(signal.SIGCHLD), signal_handling._SIGCHLD_handler_set
    signal_handling._SIGCHLD_handler_set = False
    list(DataLoader(Rows(), batch_size=32, num_workers=1))
    yield signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)
    signal_handling._SIGCHLD_handler_set = was_set


def job(loader: DataLoader[Row]) -> Job:
    """Two layers on rows of six, and one loader for every epoch."""
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: loader,
        optimizer=partial(SGD, lr=0.05),
    )


# --- how long they live


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_persistent_processes_last_to_the_end_of_the_run(transport: str, heard: object) -> None:
    """They belong to the loader, not to the thread that reads; who reads has ended before the worker has."""
    with nothing_left_behind():
        loader = DataLoader(Rows(), batch_size=8, num_workers=2, persistent_workers=True)
        made = roundelay.plan(job(loader), workers=2, rule="1f1b", micro_batches=1, cuts="equal", transport=transport)
        for _ in range(3):
            assert len(roundelay.train(job(loader), plan=made, steps=12).updates) == 12
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]


def test_a_second_reading_asks_the_processes_of_the_first() -> None:
    """The thread that has started them has nothing more to read by then."""
    reading, writing = os.pipe()

    def live() -> None:
        loader = DataLoader(Rows(), batch_size=32, num_workers=1, persistent_workers=True)
        for _ in range(2):
            with closing(
                prefetch(read_batches(lambda epoch: loader, 0, Extent(epochs=1)), Registers(1, 20.0))
            ) as source:
                count = len(list(source))
            os.write(writing, f"{count} by {loader._iterator._workers[0].pid}\n".encode())
            time.sleep(0.2)

    with nothing_left_behind():
        assert os.waitstatus_to_exitcode(os.waitpid(fork(live), 0)[1]) == 0
    first, second = os.read(reading, 999).decode().splitlines()
    assert first == second
    assert first.startswith("2 by ")
    os.close(reading), os.close(writing)


def test_with_a_killed_worker_end_processes_whose_reader_has_finished() -> None:
    reading, writing = os.pipe()

    def live() -> None:
        loader = DataLoader(Rows(), batch_size=32, num_workers=1, persistent_workers=True)
        with closing(prefetch(read_batches(lambda epoch: loader, 0, Extent(epochs=1)), Registers(1, 20.0))) as source:
            list(source)
        os.kill(loader._iterator._workers[0].pid, signal.SIGSTOP)  # it cannot look whether its parent lives
        os.write(writing, str(loader._iterator._workers[0].pid).encode())
        time.sleep(60.0)

    child = fork(live)
    process = int(os.read(reading, 99))
    assert alive(process)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 10.0
    while (left := alive(process)) and time.monotonic() < deadline:
        time.sleep(0.01)
    if left:
        os.kill(process, signal.SIGKILL)
    assert not left
    os.close(reading), os.close(writing)


def used_in_a_child_of_a_user(ends: Callable[[], object]) -> tuple[int, int, list[int]]:
    """A child forked from a process that has a server for loaders, whose loader by forkserver has a process and stays.

    Returns:
        The child, and what it has counted, and its loader's process and that one's parent.
    """
    loader = DataLoader(Rows(), batch_size=32, num_workers=1, multiprocessing_context="forkserver")
    assert len(list(loader)) == 2
    reading, writing = os.pipe()

    def live() -> None:
        own = DataLoader(
            Rows(), batch_size=32, num_workers=1, persistent_workers=True, multiprocessing_context="forkserver"
        )
        with closing(prefetch(read_batches(lambda epoch: own, 0, Extent(epochs=1)), Registers(1, 60.0))) as source:
            count = len(list(source))
        process = own._iterator._workers[0].pid
        server = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
        os.write(writing, f"{count} {process} {server}".encode())
        ends()

    child = fork(live)
    os.close(writing)
    count, *pids = map(int, os.read(reading, 99).split())
    os.close(reading)
    return child, count, pids


@pytest.mark.parametrize("killed_by", [0, signal.SIGKILL])
def test_a_server_that_processes_are_forked_from_is_the_child_s_own_and_ends_with_it(killed_by: int) -> None:
    try:
        child, count, pids = used_in_a_child_of_a_user(lambda: killed_by and time.sleep(60.0))
        assert count == 2
        if killed_by:
            os.kill(child, killed_by)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -killed_by
        deadline = time.monotonic() + 10.0
        while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left
    finally:
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # ours, which the tests would find left behind


# --- who hears of their end


def test_a_forked_child_does_not_hear_what_its_parent_hears(heard: object) -> None:
    def live() -> None:
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert not signal_handling._SIGCHLD_handler_set
        assert len(list(DataLoader(Rows(), batch_size=32, num_workers=1))) > 0
        assert signal.getsignal(signal.SIGCHLD) is not heard

    assert os.waitstatus_to_exitcode(os.waitpid(fork(live), 0)[1]) == 0
    assert signal.getsignal(signal.SIGCHLD) is heard


def test_unheard_for_a_time_and_heard_again_behind_it(heard: object) -> None:
    with without_sigchld_handler():
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        list(DataLoader(Rows(), batch_size=32, num_workers=1))
        with without_sigchld_handler():
            pass
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGCHLD) is heard
    assert signal_handling._SIGCHLD_handler_set


def test_a_loader_of_the_main_thread_meanwhile_has_nobody_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ``evaluate`` asks during a run: the run's own loader would be heard from then on."""
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with without_sigchld_handler():
            list(DataLoader(Rows(), batch_size=32, num_workers=1))
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert not signal_handling._SIGCHLD_handler_set
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_handler_of_the_person_s_own_stays() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGCHLD, own)
    try:
        with without_sigchld_handler():
            assert signal.getsignal(signal.SIGCHLD) is own
        thread = threading.Thread(target=lambda: without_sigchld_handler().__enter__())
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_child_forgets_though_torch_s_loaders_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.modules", {})
    before = signal.getsignal(signal.SIGCHLD)
    forget_loaders()
    with without_sigchld_handler():
        pass
    signal.signal(signal.SIGCHLD, before)


def killed() -> None:
    """A process is killed while nobody has anything of it on the way, so that the one who waits is not told at once."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_killed_process_is_told_with_the_batch_though_the_main_thread_could_hear_it(
    transport: str, heard: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (1.0,))  # it looks each 5 s
    loader = DataLoader(Rows(48, killed), batch_size=4, num_workers=2)
    made = roundelay.plan(job(loader), workers=2, rule="1f1b", micro_batches=1, cuts="equal", transport=transport)
    with nothing_left_behind():
        told = told_of(lambda: roundelay.train(job(loader), plan=made, epochs=1))
    assert re.fullmatch(r"batch 1\d of batches\(0\)", told.subject)
    assert "of the DataLoader was killed by SIGKILL" in told.got
    assert "fewer num_workers" in told.remedy


def test_so_it_is_before_a_run(heard: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (2.0,))
    monkeypatch.setattr("roundelay.runtime.loading.prefetch.ON_WAIT_S", 0.1)  # the main thread looks up, and would hear
    assert "of the DataLoader was killed by SIGKILL" in failing(killed, 1).got


# --- what went wrong in them, in words


def missing() -> None:
    """What an image that is not there does."""
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "images/cat_0040.jpg")


def chained() -> None:
    """An error that another has led to, told on several lines."""
    try:
        missing()
    except FileNotFoundError as error:
        raise ValueError("a row of nothing\nand its second line") from error


def line_of(function: Callable[..., object], words: str) -> int:
    """Where words stand in this file, within a function."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, line in enumerate(lines, 1) if n >= first and words in line)


def told_of(run: Callable[[], object]) -> UserCodeError:
    """The error that is raised, without the frames in which it keeps the loader."""
    with pytest.raises(UserCodeError) as caught:
        run()
    error = caught.value
    return UserCodeError(error.subject, got=error.got, expected=error.expected, remedy=error.remedy)


def failing(breaks: Callable[[], object], num_workers: int) -> UserCodeError:
    """What is told of a loader whose row breaks."""
    loader = DataLoader(Rows(40, breaks), batch_size=8, num_workers=num_workers)

    def read() -> None:
        with closing(prefetch(read_batches(lambda epoch: loader, 0, Extent(epochs=1)), Registers(1, 20.0))) as source:
            list(source)

    with nothing_left_behind():
        told = told_of(read)
    assert re.fullmatch(r"batch [45] of batches\(0\)", told.subject)  # a killed one may have the one before in hand
    assert len(told.got.splitlines()) <= 5  # that many a screen shows
    return told


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_is_told_by_its_last_line_and_its_place(num_workers: int) -> None:
    where = f" at {__file__}:{line_of(missing, 'raise FileNotFoundError')}"
    behind = ", in DataLoader worker process 1" if num_workers else ""
    told = failing(missing, num_workers)
    assert told.got == f"FileNotFoundError: [Errno 2] No such file or directory: 'images/cat_0040.jpg'{where}{behind}"
    assert "in the job's data loading" in told.remedy
    told = failing(chained, num_workers)
    where = f" at {__file__}:{line_of(chained, 'raise ValueError')}"
    assert told.got == f"ValueError: a row of nothing\nand its second line{where}{behind}"


def test_a_place_is_the_person_s_own_rather_than_that_of_what_is_installed() -> None:
    def decode() -> None:
        b"\xff".decode()
        os.path.join(3, "x")  # type: ignore[call-overload]

    def parse() -> None:
        import json

        json.loads("{")

    where = f" at {__file__}:{line_of(parse, 'json.loads')}"
    assert failing(parse, 1).got.endswith(f"{where}, in DataLoader worker process 0")
    told = failing(decode, 1).got  # an error that cannot be made again of one text
    assert told.startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")
    assert f"{__file__}:{line_of(decode, 'decode()') + 1}" in told


def test_a_message_of_many_lines_leaves_room_for_its_place() -> None:
    def much() -> None:
        raise RuntimeError("\n\n".join(str(n) * 90 for n in range(9)))

    told = failing(much, 1).got
    assert len(told) < 400 + len(__file__)
    assert f"{__file__}:{line_of(much, 'raise RuntimeError')}" in told


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGBUS, "docker run --shm-size=1g"), (signal.SIGUSR2, "Check its output")]
)
def test_a_process_that_is_killed_is_told_by_its_signal(number: signal.Signals, words: str) -> None:
    told = failing(lambda: os.kill(os.getpid(), number), 1)
    assert f"of the DataLoader was killed by {number.name}" in told.got
    assert words in told.remedy


def test_a_process_that_ends_by_itself_is_told_by_its_exit_code() -> None:
    told = failing(lambda: os._exit(3), 1)
    assert "of the DataLoader has ended with exit code 3" in told.got
    assert "num_workers=0" in told.remedy


def test_too_many_open_files_are_told_with_the_limit() -> None:
    def open_one_more() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "rows.bin")

    told = failing(open_one_more, 1)
    assert "Too many open files" in told.got
    assert "ulimit -n 4096" in told.remedy
    assert 'set_sharing_strategy("file_system")' in told.remedy


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("unable to write to file </torch_1_2_0>: No space left on device (28)"), "--shm-size=1g"),
        (RuntimeError("unable to open shared memory object </torch_1_2_0> in read-write mode"), "/dev/shm"),
        (RuntimeError("unable to open shared memory object </torch_1_2>: Too many open files (24)"), "ulimit -n"),
        (RuntimeError("received 0 items of ancdata"), "ulimit -n"),
        (OSError(errno.ENOSPC, "No space left on device"), "a disk is full"),
        (RuntimeError("process 9 of the DataLoader has ended with exit code 1"), "name must have no dot"),
        (AttributeError("Can't pickle local object 'job.<locals>.Data'"), 'multiprocessing_context="fork"'),
        (ValueError("Cannot load file containing pickled data when allow_pickle=False"), "run it alone"),
        (OSError(errno.ENOENT, "No such file or directory"), "run it alone"),
    ],
)
def test_what_helps_is_told_for_errors_that_are_known(error: Exception, words: str) -> None:
    assert words in loading_failed("batch 0 of batches(0)", error).remedy


PERSISTENT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import roundelay

data = TensorDataset(torch.randn(48, 6), torch.randint(4, (48,)))
loader = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
job = roundelay.Job(
    model=torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)),
    loss=lambda o, b: torch.nn.functional.cross_entropy(o, b[1]),
    batches=lambda epoch: loader,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
)
roundelay.plan(job, workers=2, rule="1f1b")
print("planned")
"""


def test_a_script_whose_loader_has_persistent_processes_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PERSISTENT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "planned\n", "")
