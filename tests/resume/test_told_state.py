"""What a run tells of itself: the digests of its state, the same in every layout; bytes held, sent and priced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roundelay.checkpoint.checkpoint import load
from roundelay.ir.averages import EMA
from roundelay.ir.plan import Plan
from roundelay.planner import weight_segments
from roundelay.planning.memory_report import memory_report
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.stage_state import Stage
from roundelay.session.checkpointing import Saving
from roundelay.session.run_record import RunRecord, Trained
from roundelay.session.run_summary import activation_bytes, digest_of, utilization
from roundelay.session.training import Length, Session
from tests.equivalence.cells import Bench, bench
from tests.equivalence.test_zero import split
from tests.zoo import ZOO

Planned = Callable[[Bench], Plan]


def zero(replicas: int, level: int, stages: int = 1, rule: str = "1f1b", **fields: Any) -> Planned:
    return lambda place: split(place, rule, stages, replicas, zero=level, **fields)


def cyclic(layout: str, rule: str, size: int = 3) -> Planned:
    return lambda place: place.in_layout(layout, rule, size, size)


CHAINS: dict[str, list[Planned]] = {
    "4, 2, 3 workers": [zero(4, 1), zero(2, 3), zero(3, 2), zero(1, 0)],
    "processes": [zero(2, 3, transport="shm"), zero(1, 0, stages=2, transport="shm")],
    "meshes": [zero(1, 0, tensor_parallel=3), zero(2, 3, tensor_parallel=2), zero(1, 0, stages=2)],
    "asynchronous": [zero(1, 0, 3, "pipedream"), zero(1, 0, 2, "pipeoptim"), zero(2, 2, 2, "async")],
    "averages": [zero(2, 2, ema=0.9), zero(1, 0, ema=0.9)],
    "layouts": [cyclic("mp", "cdp-v1"), cyclic("zero", "cdp-v2"), cyclic("dp", "cdp-v1"), cyclic("single", "cdp-v2")],
}


@pytest.mark.parametrize(
    ("chain", "model"),
    [*((chain, "gpt2") for chain in CHAINS), *((chain, "batchnorm") for chain in CHAINS if chain != "meshes")],
)
def test_a_run_starts_from_the_state_that_the_one_before_has_ended_with(tmp_path: Path, chain: str, model: str) -> None:
    place = bench(model)
    digests = []
    for number, planned in enumerate(CHAINS[chain]):
        done, _ = run(place, planned(place), tmp_path, number)
        workers = list(done.workers.values())
        digests.append((digest_of(workers, "start_sums"), digest_of(workers, "end_sums")))
    starts, ends = zip(*digests, strict=True)
    assert starts[1:] == ends[:-1]
    assert None not in ends
    assert len({starts[0], *ends}) == len(digests) + 1, "each run has changed it"


def run(place: Bench, plan: Plan, folder: Path, number: int = 0, steps: int = 2) -> tuple[Trained, Session]:
    """A run that goes on from the checkpoint of the run before it, if there is one."""
    place.restore()
    start = load(folder / str(number - 1)) if number else None
    session = Session(place.job(), place.captured, plan, 0, Length(steps=steps), start)
    saving = Saving(path=folder / str(number))
    return session.run(notify=lambda event: None, saving=saving, gathers="nothing"), session


@pytest.mark.parametrize("key", ["exp_avg", EMA])
def test_another_state_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    place = bench("mlp")
    done, _ = run(place, zero(2, 1, ema=0.9)(place), tmp_path)
    made = Stage.__init__

    def lossy(self: Stage, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if self.replica:
            self.steps.live()[self.owned.names[0]][key][:1] += 1

    monkeypatch.setattr(Stage, "__init__", lossy)
    rest, _ = run(place, zero(2, 1, ema=0.9)(place), tmp_path, 1)
    assert digest_of([*rest.workers.values()], "start_sums") != digest_of([*done.workers.values()], "end_sums")


def test_parts_of_a_run_have_the_start_of_the_first_and_the_end_of_the_last() -> None:
    record = RunRecord(1, lambda event: None, lambda update: ())
    usual = {"busy_s": 1.0, "wall_s": 1.0, "updates": 1, "skipped": 0, "bytes_sent": {}, "bytes_received": {}}
    for part in (1, 2):
        told = {"first_event_g": 0, "start_sums": part, "end_sums": part}
        record.take(Report("finished", 0, usual | told))
    assert (record.workers[0]["start_sums"], record.workers[0]["end_sums"]) == (1, 2)


@pytest.mark.parametrize(
    "planned",
    [
        *(zero(2, level, micro_batches=3) for level in (0, 1, 2, 3)),
        zero(2, 2, stages=2, tensor_parallel=2, clip="global:1", micro_batches=3),
        zero(1, 0, 3, "pipedream"),
        zero(2, 0, 2, "zb-v", transport="shm", micro_batches=3),
        zero(1, 0, 2, "interleaved-1f1b"),
        cyclic("mp", "cdp-v1", 2),
        cyclic("dp", "cdp-v2", 2),
    ],
)
def test_as_many_bytes_are_sent_as_the_plan_prices(tmp_path: Path, planned: Planned) -> None:
    place = Bench(ZOO["gpt2"], None, ZOO["gpt2"].batches(0, 3))
    done, session = run(place, planned(place), tmp_path, steps=3)
    told = utilization(session, done, [], [])
    assert told["bytes_sent"] == told["bytes_priced"]
    assert sum(told["bytes_sent"]) > 0


def test_each_worker_tells_the_bytes_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place = bench("gpt2")
    every = sum(parameter.num_bytes for parameter in place.captured.graph.parameters.values())
    held = {}
    for level in (0, 1, 2, 3):
        done, session = run(place, zero(2, level)(place), tmp_path / str(level))
        (held[level], _) = utilization(session, done, [], [])["memory"]
    assert held[0]["weights"] == held[0]["gradients"] == every
    assert 2 * every < held[0]["states"] < 2.1 * every, "two moments, and numbers of steps"
    assert held[0]["gathered"] == held[1]["gathered"] == held[2]["gathered"] == 0
    assert held[1]["states"] == pytest.approx(every, rel=0.1)
    assert held[1]["weights"] > every, "the own part beside the whole"
    assert held[2]["gradients"] < 0.8 * every
    assert held[3]["weights"] < 0.6 * every
    assert 0 < held[3]["gathered"] < every / 3


def test_peaks_add_tapes_or_are_the_devices(tmp_path: Path) -> None:
    place = bench("mlp")
    done, session = run(place, zero(1, 0, 2)(place), tmp_path)
    rows, tapes = utilization(session, done, [], [])["memory"], activation_bytes(done)
    for row, of_tapes in zip(rows, tapes, strict=True):
        kinds = sum(row[kind] for kind in ("weights", "gradients", "states", "gathered"))
        assert row["peak_tensor_bytes"] == kinds + of_tapes > kinds
    workers = {number: {**report, "device_peak_bytes": 7} for number, report in done.workers.items()}
    assert [row["peak_tensor_bytes"] for row in memory_report(done.plan, None, workers, tapes)] == [7, 7]


@pytest.mark.parametrize(("rule", "versions"), [("pipedream", [2, 1]), ("pipedream-2bw", [2, 2])])
def test_older_versions_count_as_weights(tmp_path: Path, rule: str, versions: list[int]) -> None:
    place = bench("gpt2")
    done, session = run(place, zero(1, 0, 2, rule)(place), tmp_path, steps=5)
    for row, count in zip(utilization(session, done, [], [])["memory"], versions, strict=True):
        predicted = row["predicted"]
        assert row["weights"] == predicted["weights"] + predicted["versions"] == count * predicted["weights"] > 0
