"""Bytes of each worker's tensors under ZeRO, beside torch's FSDP2 on the same job.

A GPT of 29 million parameters and a perceptron of 96 small layers, AdamW, on 2 and 4 processes of one thread: ours is
``--workers 1 --data-parallel N --zero 1|2|3 --rule 1f1b --micro-batches 1`` over shm, with and without ``--recompute
all``; torch's is ``fully_shard`` of every layer and of the whole, over gloo. As OneFlow (2021), section 6.4, Fig. 15.

Weights, gradients, states and gathered are what a run's summary tells of the worker that holds most
(`docs/running.md`); of FSDP2 the parts that a rank has after an update, and its largest layer, which it gathers. Live
are all tensors of its process after the last update, every storage once; ours has the captured model among them, which
the forked workers share with the launcher, so that it is stored once.
"""

from __future__ import annotations

import functools
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common import asked, report, table
from benchmarks.data_parallel import run as perceptron
from benchmarks.tensor_parallel import run as gpt
from benchmarks.two_processes import of_ranks, planned
from benchmarks.zero.run import ADAMW, sharded
from roundelay import Job
from roundelay.actor.machine import Run
from roundelay.frontend.stages.segment import storages_of
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import Context, do_update
from roundelay.runtime.stage_state import HELD
from roundelay.session.run_summary import activation_bytes, utilization

MB = 1e6
STEPS = 6
COLUMNS = ["MB", *HELD, "tapes", "first three, of target", "live", "samples/s"]


@dataclass(frozen=True)
class Case:
    """A model to train.

    Args:
        build: makes it.
        layers: those of its modules that are sharded as one.
        batch: inputs and labels.
    """

    build: Callable[[], nn.Module]
    layers: Callable[[nn.Module], list[nn.Module]]
    batch: tuple[Tensor, Tensor]

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs.flatten(0, -2), labels.flatten())


CASES = {
    "GPT": Case(lambda: gpt.model(512, 9), lambda model: [*model.blocks], gpt.data(4)),  # type: ignore[arg-type]
    "96 layers": Case(
        lambda: perceptron.model(128, 96), lambda model: list(model.children())[::2], perceptron.data(128, 64)
    ),
}


def live_bytes() -> int:
    """Bytes of all tensors of this process, every storage once."""
    gc.unfreeze()  # what a worker has from the launcher
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum(storages_of(tensor for tensor in tensors if tensor.device.type == "cpu").values())


def ours(case: Case, size: int, zero: int, recompute: str | None) -> dict[str, float]:
    """Of the worker that holds most."""
    with tempfile.TemporaryDirectory() as made:
        job = Job(
            model=case.build(),
            loss=lambda outputs, batch: case.loss(outputs, batch[1]),
            batches=lambda epoch: [case.batch] * STEPS,
            optimizer=ADAMW,
        )
        chosen = {"data_parallel": size, "zero": zero, "transport": "shm", "recompute": recompute}
        session = planned(job, STEPS, **chosen)

        def update(context: Context, run: Run) -> MicroBatch | None:
            do_update(context, run)
            if run.version == STEPS - 1:
                (Path(made) / str(context.worker)).write_text(json.dumps(live_bytes()))
            return None

        done = session.run(notify=lambda event: None, gathers="nothing", handlers={0: {"update": update}})
        live = [json.loads(file.read_text()) for file in Path(made).iterdir()]
    memory = utilization(session, done, [], [])["memory"]
    found = {kind: max(row[kind] for row in memory) for kind in HELD} | {"tapes": max(activation_bytes(done))}
    return found | {"live": max(live), "rate": done.samples_per_second}


def theirs(case: Case, size: int) -> dict[str, float]:
    """Of the rank that holds most."""

    def measure(rank: int) -> dict[str, float]:
        own, (x, y) = case.build(), case.batch
        layer = max(sum(p.nbytes for p in layer.parameters()) for layer in case.layers(own))
        own = sharded(own, case.layers(own), size)
        optimizer, took = ADAMW(own.parameters()), []
        for _ in range(STEPS):
            start = time.perf_counter()
            optimizer.zero_grad()
            case.loss(own(x[rank::size]), y[rank::size]).backward()
            optimizer.step()
            took.append(time.perf_counter() - start)
        parts: list[Any] = list(own.parameters())
        held = {"weights": parts, "gradients": [p.grad for p in parts]}
        held["states"] = [value for state in optimizer.state.values() for value in state.values()]
        sizes = {kind: float(sum(storages_of(map(_local, tensors)).values())) for kind, tensors in held.items()}
        return sizes | {"gathered": layer, "live": live_bytes(), "rate": len(x) / sorted(took)[STEPS // 2]}

    ranks = of_ranks(measure, size)
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def row(case: Case, size: int, name: str, found: dict[str, float]) -> list[str]:
    """A row of the table; the target is 1.05 / N of weights, gradients and two moments, and two layers."""
    model = case.build()
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in case.layers(model)]
    target = 1.05 * 4 * sum(p.nbytes for p in model.parameters()) / size + 2 * max(layers)
    held = sum(found[kind] for kind in HELD[:3])
    figures = [f"{found[kind] / MB:.1f}" if kind in found else "" for kind in (*HELD, "tapes")]
    return [name, *figures, f"{held / target:.2f}", f"{found['live'] / MB:.1f}", f"{found['rate']:.2f}"]


def main() -> None:
    what = asked(__doc__ or "", 1)
    rows, numbers = [], {}
    for name, case in CASES.items():
        for size in (2, 4):
            candidates: dict[str, Callable[[], dict[str, float]]] = {
                f"{name}, N = {size}: FSDP2": functools.partial(theirs, case, size)
            }
            for zero in (1, 2, 3):
                for recompute in (None, "all"):
                    how = f"ours, ZeRO {zero}" + (", recompute all" if recompute else "")
                    candidates[f"{name}, N = {size}: {how}"] = functools.partial(ours, case, size, zero, recompute)
            for said, measure in candidates.items():
                numbers[said] = measure()
                rows.append(row(case, size, said, numbers[said]))
    report(what, table(COLUMNS, rows), {"bytes": numbers})


if __name__ == "__main__":
    main()
