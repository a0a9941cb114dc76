"""Data read ahead: the same batches in the same order, no more than two at a time, and an end in every case."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, get_worker_info

import roundelay
from roundelay.actor.machine import Run
from roundelay.errors import DeadlineError, UserCodeError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.job import Job
from roundelay.lower import emit as emitting
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.runtime.handlers import Context, do_forward, do_read
from roundelay.runtime.loading import prefetch as module
from roundelay.runtime.loading.prefetch import Registers, prefetch
from roundelay.session.training import Length, Session
from tests.api.jobs import Noisy, make
from tests.conftest import nothing_left_behind

SECONDS = 20.0


def two() -> Registers:
    """Two registers."""
    return Registers(2, SECONDS)


def readers() -> list[str]:
    """Threads that read ahead."""
    return [thread.name for thread in threading.enumerate() if thread.name == "roundelay-reader"]


def until(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold in time."""
    end = time.monotonic() + SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def counted(made: list[int], count: int = 9) -> Generator[int, None, None]:
    """Numbers, each noted when it is made; the end as well."""
    try:
        for number in range(count):
            made.append(number)
            yield number
    finally:
        made.append(-1)


def test_nothing_is_lost_doubled_or_out_of_order() -> None:
    made: list[int] = []
    assert list(prefetch(counted(made), two())) == list(range(9))
    assert made[-1] == -1
    assert not readers()


def test_one_is_made_while_another_is_in_use_and_no_more() -> None:
    made: list[int] = []
    source = prefetch(counted(made), two())
    assert next(source) == 0
    assert until(lambda: made == [0, 1])
    time.sleep(0.1)
    assert made == [0, 1]
    assert next(source) == 1
    assert until(lambda: made == [0, 1, 2])
    source.close()
    assert made == [0, 1, 2, -1]
    assert not readers()


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_are_made_as_there_are_registers(count: int) -> None:
    made: list[int] = []
    with closing(prefetch(counted(made), Registers(count, SECONDS))) as source:
        assert next(source) == 0
        assert until(lambda: made == list(range(count)))
        time.sleep(0.1)
        assert made == list(range(count))


def test_what_was_loaded_is_noted_with_its_time() -> None:
    def slow() -> Generator[int, None, None]:
        for number in range(3):
            time.sleep(0.03)
            yield number

    registers, begin = two(), time.perf_counter()
    assert list(prefetch(slow(), registers)) == [0, 1, 2]
    assert [number for number, _, _ in registers.loads] == [0, 1, 2]
    assert all(end - start >= 0.029 for _, start, end in registers.loads)
    times = [at for _, start, end in registers.loads for at in (start, end)]
    assert begin <= times[0]
    assert times == sorted(times)
    assert times[-1] <= time.perf_counter()


def test_a_failure_comes_in_its_place() -> None:
    def failing() -> Generator[int, None, None]:
        yield from range(3)
        raise UserCodeError("the loader", got="a hole", expected="data", remedy="Fill it.")

    source = prefetch(failing(), two())
    assert [next(source), next(source), next(source)] == [0, 1, 2]
    with pytest.raises(UserCodeError, match="a hole"):
        next(source)
    assert not readers()


def test_a_loader_that_hangs_is_told_in_time_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    let_go = threading.Event()

    def hanging() -> Generator[int, None, None]:
        yield 0
        let_go.wait(SECONDS)
        yield 1

    source = prefetch(hanging(), Registers(2, 0.2))
    assert next(source) == 0
    with pytest.raises(DeadlineError, match=r"the data: got no batch from the loader for 0.2 s.*raise deadline_s"):
        next(source)
    let_go.set()
    assert until(lambda: not readers())


def stubborn(ready: Any) -> None:
    """A loader's process that no SIGTERM ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.release()
    time.sleep(SECONDS)


def test_processes_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_S", 3.0)
    forked = multiprocessing.get_context("fork")
    ready = forked.Semaphore(0)
    processes = [forked.Process(target=stubborn, args=(ready,), daemon=True) for _ in range(5)]
    for process in processes:
        process.start()
    for _ in processes:
        assert ready.acquire(timeout=SECONDS)
    start = time.monotonic()
    module._end(processes)
    assert time.monotonic() - start < 12.0  # one after the other it would be fifteen seconds
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 5


# --- in a run


def small(batches: Callable[[int], Any]) -> Job:
    """Three layers on rows of six."""
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=batches,
        optimizer=partial(SGD, lr=0.05),
    )


def test_a_run_computes_while_its_loader_loads() -> None:
    """The forward of micro-batch 10 waits until batch 12 has been asked for: read in line, that would be never.

    The first nine have been looked at by planning.
    """
    asked: dict[int, threading.Event] = {n: threading.Event() for n in range(20)}

    def batches(epoch: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        for number in range(20):
            asked[number].set()
            yield torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)

    def waits(context: Context, run: Run) -> MicroBatch | None:
        if run.g == 10:  # the batch behind it is always read, to know whether the epoch ends
            assert asked[12].wait(SECONDS)
        return do_forward(context, run)

    job = small(batches)
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, workers=2, rule="pipedream", micro_batches=1, cuts="equal")
    for event in asked.values():
        event.clear()
    session = Session(job, captured, plan, 0, Length(steps=15))
    done = session.run(notify=lambda event: None, handlers={0: {"forward": waits}})
    assert len(done.updates) == 15
    assert not readers()


def epoch_of(count: int, epoch: int) -> Iterator[Any]:
    """Batches that take a little while."""
    for number in range(count):
        time.sleep(0.002)
        yield torch.full((4, 6), float(number)), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_run_tells_what_was_loaded_and_keeps_to_its_registers(transport: str) -> None:
    """As the simulator's reader does: a batch is there before its `read` ends, and begun when a register is free."""
    job = small(partial(epoch_of, 6))
    plan = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=2, cuts="equal", transport=transport)
    assert plan.read_s >= 0.001
    done = roundelay.train(job, plan=plan, epochs=2)
    assert list(done.loads) == [0]
    assert [load.batch for load in done.loads[0]] == list(range(12))
    reads: dict[int, list[tuple[float, float]]] = {}
    for opcode, _, batch, _, _, start, end, *_ in done.events[0]:
        if opcode == "read":
            reads.setdefault(batch, []).append((start, end))
    for _, batch, start, end in done.loads[0]:
        assert start < end <= reads[batch][0][1]
        assert start >= reads[max(0, batch - 1)][0][0]


def test_the_program_says_how_many_registers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of them the loads and the reads take turns."""
    job = small(partial(epoch_of, 6))
    monkeypatch.setattr(emitting, "REGISTERS", 1)
    plan = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=1, cuts="equal")
    assert str(emit(read(plan))[0]).splitlines()[3] == "registers 1"
    done = roundelay.train(job, plan=plan, epochs=1)
    reads = [(event[5], event[6]) for event in done.events[0] if event[0] == "read"]
    assert all(a <= start < end <= b for (_, _, start, end), (a, b) in zip(done.loads[0], reads, strict=True))


def failing_at(number: int) -> Callable[[int], Iterator[Any]]:
    """Epochs whose batch ``number`` cannot be had."""

    def batches(epoch: int) -> Iterator[Any]:
        for n in range(6):
            if n == number:
                raise OSError("the disk is gone")
            yield torch.ones(4, 6) * n, torch.zeros(4, dtype=torch.long)

    return batches


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_an_error_of_the_loader_tells_its_place(transport: str) -> None:
    job = small(failing_at(4))
    plan = roundelay.plan(job, workers=2, rule="pipedream", micro_batches=1, cuts="equal", transport=transport)
    with nothing_left_behind():
        with pytest.raises(UserCodeError, match=r"batch 4 of batches\(0\).*OSError: the disk is gone"):
            roundelay.train(job, plan=plan, epochs=1)
        assert len(roundelay.train(job, plan=plan, steps=3).updates) == 3  # what lies behind is not met


def same(loader: DataLoader[Any], epoch: int) -> DataLoader[Any]:
    """One loader for every epoch."""
    return loader


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that are always the same: persistent processes keep their random states from epoch to epoch."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), float(index)), torch.tensor(index % 3)


class Whose(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows that hold the number of the process that has made them; -1 where it is the run's own."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        info = get_worker_info()
        return torch.full((6,), -1.0 if info is None else float(info.id)), torch.tensor(index % 3)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_a_loader_s_own_processes_are_what_loads(transport: str, tmp_path: Path) -> None:
    def noting(context: Context, run: Run) -> MicroBatch | None:
        header = do_read(context, run)
        assert header is not None
        numbers = [int(value[0, 0]) for value in context.values[header.g].values() if value.ndim == 2]
        with (tmp_path / "seen").open("a") as file:  # the worker may be a process
            file.write(f"{numbers}\n")
        return header

    with nothing_left_behind():
        job = small(lambda epoch: DataLoader(Whose(), batch_size=8, num_workers=2))
        captured = roundelay.capture(job)
        choices = {"workers": 2, "rule": "1f1b", "micro_batches": 1, "cuts": "equal", "transport": transport}
        session = Session(job, captured, roundelay.plan(job, captured=captured, **choices), 0, Length(epochs=1))
        session.run(notify=lambda event: None, handlers={0: {"read": noting}})
    assert (tmp_path / "seen").read_text().split("\n")[:-1] == ["[0]", "[1]"] * 2


@pytest.mark.parametrize(("rows", "persistent"), [(Noisy(), False), (Rows(), True)])
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_loaders_with_processes_of_their_own_verify_and_leave_none(
    transport: str, rows: Dataset[tuple[torch.Tensor, torch.Tensor]], persistent: bool
) -> None:
    with nothing_left_behind():
        loader = DataLoader(rows, batch_size=8, shuffle=True, num_workers=2, persistent_workers=persistent)
        job = make(batches=partial(same, loader))
        plan = roundelay.plan(job, workers=2, rule="1f1b", micro_batches=2, cuts="equal", transport=transport)
        found = roundelay.verify(job, plan=plan, epochs=2)
        assert found.equal, found.difference
        if persistent:  # these are the person's, and live as long as the loader
            loader._iterator._shutdown_workers()  # type: ignore[union-attr]
