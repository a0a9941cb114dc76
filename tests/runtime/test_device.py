"""Devices: their names, copies ahead, spans; with an accelerator that is none, as the order of things needs no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import pytest
import torch

import roundelay
from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.micro_batch import stream
from roundelay.launching import threaded_workers
from roundelay.planning import examined
from roundelay.runtime import device as of_workers
from roundelay.runtime.device import HOST, AcceleratorDevice, Spans, resolve_devices
from roundelay.runtime.handlers import HANDLERS
from tests.api.jobs import make, mlp
from tests.runtime.accelerator import Fake

PLACE = torch.device("cpu")


def present(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)


@pytest.mark.parametrize(
    ("count", "text", "transport", "names"),
    [
        (0, None, "memory", ("cpu", "cpu", "cpu")),
        (2, None, "memory", ("cuda:0", "cuda:1", "cuda:0")),
        (2, None, "gloo", ("cpu", "cpu", "cpu")),
        (2, "cpu", "memory", ("cpu", "cpu", "cpu")),
        (1, "cuda", "memory", ("cuda:0", "cuda:0", "cuda:0")),
        (2, "cuda:1, cpu,cuda:0", "memory", ("cuda:1", "cpu", "cuda:0")),
    ],
)
def test_devices_are_one_per_stage(
    monkeypatch: pytest.MonkeyPatch, count: int, text: str | None, transport: str, names: tuple[str, ...]
) -> None:
    present(monkeypatch, count)
    assert resolve_devices(text, 3, transport) == names


@pytest.mark.parametrize(
    ("count", "text", "words"),
    [
        (0, "cuda", "torch sees no CUDA device here"),
        (1, "cuda:0,cuda:1,cpu", "cuda:1: no such device here"),
        (2, "cuda:0,cuda:1", "2 devices for 3 workers"),
    ],
)
def test_devices_that_are_not_here_are_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, count: int, text: str, words: str
) -> None:
    present(monkeypatch, count)
    with pytest.raises(PlanError, match=words) as error:
        resolve_devices(text, 3, "memory")
    assert error.value.remedy


def test_on_the_cpu_nothing_is_put_between() -> None:
    data: Any = iter(())
    told: list[Any] = []
    assert HOST.feed(data) is data
    assert HOST.instrumented(HANDLERS) is HANDLERS
    assert HOST.spans(told, 0) is told
    ends = [object(), object()]
    assert threaded_workers.wrap_for_streams(ends, [HOST, HOST], Fake()) == ends  # type: ignore[arg-type]


class Source:
    """Micro-batches that note when they are read."""

    def __init__(self, count: int) -> None:
        self.read = 0
        self.closed = False
        self.data = self._data(count)

    def _data(self, count: int) -> Generator[Any, None, None]:
        try:
            for header in stream([1] * count):
                self.read += 1
                own = {"x": torch.full((2,), float(header.g)), "y": torch.tensor(header.g)}
                yield (header, own), (header._replace(replica=1), own)
        finally:
            self.closed = True


def test_the_next_micro_batch_is_copied_when_the_one_before_it_begins_and_no_other() -> None:
    driver, source = Fake(), Source(5)
    fed = AcceleratorDevice(PLACE, driver).feed(source.data)
    own, copies = driver.streams
    seen = []
    for g, ((header, values), (other, _)) in enumerate(fed):
        assert other.replica == 1
        seen.append(header.g)
        assert source.read == min(g + 2, 5)
        assert values["x"].tolist() == [g, g]
        assert {(v.data_ptr(), own.number) for v in values.values()} <= set(driver.kept)
        # the stream waits for this micro-batch's copy, and not for the one under way
        assert own.clock[copies.number] == g + 1
    assert seen == list(range(5))
    assert driver.pins == 10
    assert source.closed


def test_data_that_is_left_early_is_closed() -> None:
    source = Source(5)
    fed = AcceleratorDevice(PLACE, Fake()).feed(source.data)
    next(fed)
    fed.close()
    assert source.closed


def test_copies_are_made_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, source, places = Fake(), Source(2), []
    pinned = driver.pinned
    monkeypatch.setattr(driver, "pinned", lambda tensor: places.append(driver.current) or pinned(tensor))
    device = AcceleratorDevice(PLACE, driver)
    with device.active():
        list(device.feed(source.data))
    assert {place.number for place in places if place} == {1}
    assert driver.streams[0] is device.stream


def test_spans_are_those_of_the_device_and_reads_are_the_hosts() -> None:
    driver = Fake()
    driver.now_ms = 3_600_000.0  # an hour: from the start on, single precision would round to a quarter of a ms
    spans = Spans(driver, driver.stream(PLACE))
    run: Any = Run

    def handler(context: Any, run: Any) -> None:
        driver.now_ms += 0.010

    read, forward = spans.around(handler, False), spans.around(handler, True)
    for one in (read, forward, read, forward, forward):
        driver.now_ms += 0.005
        one(run, run)
    rows: Any = [(run, 0, 1.0, 2.0, 7)] * 5
    told = spans.apply(rows, 0)
    assert [told[i] for i in (0, 2)] == [rows[0]] * 2
    starts = [told[i][2] for i in (1, 3, 4)]
    assert [end - start for start, end in ((told[i][2], told[i][3]) for i in (1, 3, 4))] == pytest.approx(
        [1e-5] * 3, abs=1e-7
    )
    assert [b - a for a, b in itertools.pairwise(starts)] == pytest.approx([3e-5, 1.5e-5], abs=1e-7)
    assert spans.busy_s == pytest.approx(3e-5, abs=1e-7)
    assert told[1][4] == 7


def test_work_that_the_device_has_not_done_yet_is_not_counted() -> None:
    driver = Fake()
    spans = Spans(driver, driver.stream(PLACE))
    driver.done_ms = 0.0
    driver.now_ms = 1.0
    any_run: Any = None
    spans.around(lambda context, run: None, True)(any_run, any_run)
    spans.read()
    assert len(spans._waiting) == 1
    driver.done_ms = 2.0
    spans.read()
    assert not spans._waiting


def test_a_run_on_streams_is_the_run_on_the_cpu_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Fake()
    plain = roundelay.verify(make(mlp()), workers=2, steps=3)
    monkeypatch.setattr(threaded_workers, "make_device", lambda name, *_: AcceleratorDevice(PLACE, driver))
    monkeypatch.setattr(threaded_workers, "Cuda", lambda: driver)
    streamed = roundelay.verify(make(mlp()), workers=2, steps=3)
    assert plain.equal
    assert streamed.equal, streamed.difference
    assert driver.pins
    assert {number for _, number in driver.kept} == {0, 2}  # both workers' own streams


def test_a_worker_tells_the_most_bytes_of_its_device_since_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Fake()
    monkeypatch.setattr(threaded_workers, "make_device", lambda name, *_: AcceleratorDevice(PLACE, driver))
    monkeypatch.setattr(threaded_workers, "Cuda", lambda: driver)
    done = roundelay.train(make(mlp()), workers=2, steps=1, out=False, progress=False, check="off")
    assert [report["device_peak_bytes"] for report in done.workers.values()] == [2000, 2000]


@pytest.mark.parametrize(
    ("here", "devices", "transport", "holders", "count"),
    [
        (1, None, "memory", 1, 1),
        (4, None, "memory", 1, 4),
        (4, None, "memory", 2, 2),
        (4, None, "memory", 8, 1),
        (4, "cuda:0,cuda:0", "memory", 1, 2),
        (4, "cuda:1", "memory", 1, 1),
        (4, "cpu", "memory", 1, 2),
        (4, "cpu", "memory", 8, 1),
        (4, "cpu", "memory", 16, 1),
        (4, None, "shm", 1, 2),
        (0, None, "memory", 1, 2),
    ],
)
def test_there_is_a_worker_for_each_gpu_or_else_two(
    here: int, devices: str | None, transport: str, holders: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "num_cuda_devices", lambda: here)
    monkeypatch.setattr(of_workers, "num_cuda_devices", lambda: here)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    assert examined.default_workers(holders, devices, transport) == count
