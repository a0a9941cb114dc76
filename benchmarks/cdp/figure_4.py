"""Cyclic Data Parallelism (2024), Figure 4: activation memory of ResNet-50 and ViT-B/16 by number of workers.

By the paper's method a worker's memory m(t) over a forward and backward is measured, and N workers' is extrapolated:
N copies of the curve, each T/N later. Beside it stands what stages of the program hold, for cuts by equal FLOPs, as in
the paper, and for cuts for little memory (`--cuts memory-time`):

- counted: in steps of equal length, from the bytes of the stages' tapes;
- in `dp`: in a simulated run with the measured times of stages, each worker at its own pace;
- in `single`: on one worker that takes micro-batches in turns.

Numbers are reductions of what N workers hold that all start together. Ideal is (N - 1) / 2N, that of N equal stages; a
curve without steps may come to 1/2, and stages that are not equal to more. "Slowest stage" is its time divided by that
of the fastest cuts: how much longer equal steps are. Images of 224 x 224; two in a micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay
from benchmarks.cdp.figure_4_memory import Memory, in_time, kept_by_tapes, measured, simulated, staggered
from benchmarks.cdp.figure_4_picture import Panel, picture
from benchmarks.common import machine, table
from benchmarks.networks.resnet import resnet
from benchmarks.networks.vit import vit
from roundelay.comparison.cyclic_costs import chain
from roundelay.frontend import Captured
from roundelay.ir.graph import Profile
from roundelay.ir.plan import Plan
from roundelay.planner.choose_cuts import FLOPS, MEMORY_TIME, cut
from roundelay.planner.cost_model import CostParameters, Cuts, StageCosts, stage_costs
from roundelay.planner.kept_bytes import KeptBytes, SavedStorages, kept_bytes, staggered_bytes
from roundelay.planner.partition_dp import best_cuts
from roundelay.planning.profiling import profiled, saved_storages

SIZES = (4, 8, 32)
PAPER = {("ResNet-50", 32): "30 %", ("ViT-B/16", 32): "42 %"}
"""Sect. 5; of the curves for 4 and 8 workers no numbers are given."""

NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "ResNet-50": partial(resnet, 50, 1000),
    "ViT-B/16": partial(vit, 1000),
}
ROWS, SIDE, CLASSES = 2, 224, 1000
RULE = "cdp-v1"
PICTURE = Path(__file__).with_suffix(".svg")

Batch = tuple[Tensor, Tensor]
COLUMNS = (
    "network", "N", "ideal", "paper", "its method, our m(t)",
    "cuts", "counted", "slowest stage", "in `dp`", "in `single`",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Network:
    """A captured network, with what one micro-batch needs.

    Args:
        captured: the network and its loss.
        micro_batch: images and labels.
        profile: seconds of its operations.
        costs: seconds of all stages; messages take none.
        kept: bytes of all stages on one worker, as planned.
    """

    captured: Captured
    micro_batch: Batch
    profile: Profile
    costs: StageCosts
    kept: KeptBytes


@dataclass(frozen=True, slots=True)
class Staged:
    """A network in N stages, and by which share staggered micro-batches hold less at one time.

    Args:
        cuts: where it is cut.
        planned: bytes of each stage, as planned.
        kept: bytes that each stage's tape holds.
        counted: reduction in steps of equal length.
        slowest: seconds of the slowest stage, by those of the fastest cuts.
        together: memory in a run with one worker for each micro-batch, all of which start together.
        dp: the same where they are staggered.
        single: memory in a run with one worker, staggered.
    """

    cuts: Cuts
    planned: Sequence[int]
    kept: Sequence[int]
    counted: float
    slowest: float
    together: Memory
    dp: Memory
    single: Memory


def job(model: nn.Module, batch: Batch) -> roundelay.Job:
    return roundelay.Job(
        model=model,
        loss=lambda outputs, own: F.cross_entropy(outputs, own[1]),
        batches=lambda epoch: [batch],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def network(model: nn.Module, micro_batch: Batch) -> Network:
    """Capture a network, and measure its operations on a micro-batch."""
    captured = roundelay.capture(job(model, micro_batch))
    profile, _ = profiled(captured, micro_batch, threads=1)
    free = CostParameters(micro_batches=1, latency_s=0.0, bytes_per_s=1e30)
    kept = kept_bytes(captured.graph, saved_storages(captured, micro_batch), shared=True)
    return Network(captured, micro_batch, profile, stage_costs(captured.graph, profile, free), kept)


class _Known:
    """A network as the source of its cuts."""

    def __init__(self, own: Network) -> None:
        self._own, self.graph = own, own.captured.graph

    def profile(self, draft: Plan) -> tuple[Profile, str]:
        """Seconds of its operations, as they were measured once."""
        return self._own.profile, "measured"

    def storages(self, draft: Plan) -> SavedStorages:
        """What its operations keep of the micro-batch."""
        return saved_storages(self._own.captured, self._own.micro_batch)


def staged(own: Network, size: int, way: str) -> Staged:
    """Cut a network into N stages, and let N micro-batches run through them, staggered."""
    graph, draft = own.captured.graph, chain(size, rule=RULE, layout="dp", replicas=size)
    ends = cut(_Known(own), draft, way, size).stages
    cuts = (0, *(graph.index(names[-1]) + 1 for names in ends[:-1]), len(graph.ops) + 1)
    kept = kept_by_tapes(own.captured, ends, own.micro_batch)
    runs = [("dp", "1f1b"), ("dp", RULE), ("single", RULE)]
    together, dp, single = (simulated(in_time(layout, rule, cuts, kept, own.profile)) for layout, rule in runs)
    return Staged(
        cuts=cuts,
        planned=[own.kept.of_stage(start, stop) for start, stop in pairwise(cuts)],
        kept=kept,
        counted=1 - max(staggered_bytes(kept, size)) / (size * sum(kept)),
        slowest=own.costs.slowest_s(cuts) / own.costs.slowest_s(best_cuts(own.costs, size)[0]),
        together=together,
        dp=dp,
        single=single,
    )


def worker(model: nn.Module, batch: Batch, repeats: int) -> Memory:
    """m(t): what one worker's activations take during a forward and backward of the plain network, per image."""
    model.train()
    found = measured(lambda: F.cross_entropy(model(batch[0]), batch[1]).backward(), repeats)
    return Memory(found.period_s, [(time, held / len(batch[1])) for time, held in found.points])


Found = Mapping[tuple[int, str], Staged]
"""By number of micro-batches, and way to cut."""


def lines(name: str, curve: Memory, found: Found) -> Iterator[list[str]]:
    """The rows of a network."""
    for (size, way), own in found.items():
        yield [
            name, str(size), f"{(size - 1) / (2 * size):.1%}", PAPER.get((name, size), "–"),
            f"{staggered(curve, size).saved_of(curve):.1%}",
            way, f"{own.counted:.1%}", f"{own.slowest:.2f}",
            f"{own.dp.saved_of(own.together):.1%}", f"{own.single.saved_of(own.together):.1%}",
        ]  # fmt: skip


def panels(name: str, curve: Memory, found: Found) -> list[Panel]:
    """A network's curves: measured and extrapolated; and of the program's stages, cut either way, in `single`."""
    sizes = [size for size, way in found if way == FLOPS]
    all_three = [("measured, staggered by the paper's method", curve, {n: staggered(curve, n) for n in sizes})]
    for what, way in (("stages of equal FLOPs, simulated", FLOPS), ("stages cut for little memory", MEMORY_TIME)):
        others = {size: per_image(found[size, way].single) for size in sizes}
        all_three.append((what, per_image(found[sizes[-1], way].together), others))
    return [
        (
            f"{name}, MB per image: {what}",
            {"data parallelism": together, **{f"staggered, N = {n}": m for n, m in others.items()}},
        )
        for what, together, others in all_three
    ]


def per_image(memory: Memory) -> Memory:
    return Memory(memory.period_s, [(time, held / ROWS) for time, held in memory.points])


def deviation(found: Found) -> float:
    """By which share the tapes of a stage differ most from what was planned, of those of all stages."""
    return max(abs(a - b) / sum(own.kept) for own in found.values() for a, b in zip(own.kept, own.planned, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the curve is made")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="where the picture goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    drawn: list[list[Panel]] = []
    notes = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        batch = torch.randn(ROWS, 3, SIDE, SIDE), torch.randint(0, CLASSES, (ROWS,))
        model = make()
        curve, own = worker(model, batch, args.repeats), network(model, batch)
        found = {(size, way): staged(own, size, way) for size in args.sizes for way in (FLOPS, MEMORY_TIME)}
        rows += lines(name, curve, found)
        drawn.append(panels(name, curve, found))
        notes.append(
            f"{name}: {curve.peak / 1e6:.1f} MB per image measured, of which {own.kept.whole / ROWS / 1e6:.1f} MB are "
            f"kept for the backward; a stage's tape differs from its plan by {deviation(found):.2%} of all at most"
        )
    print(table(COLUMNS, rows))
    print("", *notes, machine(), sep="\n")
    args.picture.write_text(picture([panel for row in zip(*drawn, strict=True) for panel in row]))


if __name__ == "__main__":
    main()
