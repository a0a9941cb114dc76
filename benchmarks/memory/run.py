"""The largest batch that fits a budget of bytes per worker, by rule: PipeOptim (2023), Table V, in small.

Four transformer blocks on D = 4 workers, AdamW. A worker's ledger: the weights in every version that is alive, their
gradients and two moments, the tapes in flight and the unread messages, as the simulator reckons them from the plan;
with `recompute` also the one tape that is made again. The largest batch is found by planning again and again; then it
is run beside the smallest (one row per micro-batch), and what the ledger says that the larger one needs beyond the
smaller is held against what each process has written beyond it by the end, and against what its resident memory has at
most grown to beyond it.

Below, workers of a model whose weights lie in a file (`benchmarks/memory/weights.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.memory.weights import COLUMNS, held
from benchmarks.stage_functions.run import Attention
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.planner.memory_model import estimate_memory
from roundelay.session.training import Length, Session

D, WIDTH, LENGTH, BLOCKS = 4, 64, 64, 4
MIB = 2**20
RULES = (
    ("gpipe", "stash", 8),
    ("1f1b", "stash", 8),
    ("pipedream", "stash", 1),
    ("pipeoptim", "stash", 1),
    ("pipeoptim", "mixed", 1),
    ("pipeoptim", "recompute", 1),
)


def job(rows: int) -> roundelay.Job:
    torch.manual_seed(0)
    batch = {"x": torch.randn(rows, LENGTH, WIDTH)}
    return roundelay.Job(
        model=nn.Sequential(*(Attention(WIDTH, 4) for _ in range(BLOCKS))),
        loss=lambda outputs, batch: (outputs * outputs).mean(),
        batches=lambda epoch: [batch] * 100,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
    )


@functools.cache
def planned(rule: str, backward: str, micro_batches: int, rows: int) -> tuple[roundelay.Job, Captured, Plan]:
    made = job(rows)
    captured = roundelay.capture(made)
    chosen = {"rule": rule, "backward": backward, "micro_batches": micro_batches}
    # A block each, at every size: measured cuts follow the batch, and then neither weights nor moments cancel out.
    sums = [op.name for op in captured.graph.ops if op.target.startswith("aten.add")]  # two for each block
    plan = roundelay.plan(made, captured=captured, workers=D, transport="gloo", cuts=",".join(sums[1:-1:2]), **chosen)
    return made, captured, plan


def needed(rule: Sequence[Any], rows: int) -> list[int]:
    """The plan's ledger with Adam's two moments, and the one whole tape that a recomputed forward makes again."""
    plan = planned(rule[0], rule[1], rule[2], rows)[2]
    found = [one.total for one in estimate_memory(plan, [2 * stage.parameter_bytes for stage in plan.stages])]
    if rule[1] != "recompute":
        return found
    whole = planned(rule[0], "stash", rule[2], rows)[2].stages
    return [size + stage.tape_bytes for size, stage in zip(found, whole, strict=True)]


def largest(rule: Sequence[Any], budget: int, most: int) -> int:
    """The most rows per batch whose ledger fits everywhere; by bisection, as a ledger grows with the rows."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = max(needed(rule, middle * rule[2])) <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * rule[2]


def measured(rule: Sequence[Any], rows: int) -> tuple[list[int], list[int]]:
    """Bytes of each worker's process in a short run: written by its end, and resident at most less at the start."""
    made, captured, plan = planned(rule[0], rule[1], rule[2], rows)
    trained = Session(made, captured, plan, 0, Length(steps=6)).run(notify=lambda event: None)
    told = [trained.workers[k] for k in range(D)]
    written = [int(one["private_bytes"] or 0) for one in told]
    return written, [int(one["peak_rss_bytes"] or 0) - int(one["rss_at_start_bytes"] or 0) for one in told]


def beyond(larger: Sequence[int], smaller: Sequence[int]) -> str:
    """The differences by worker, in MiB."""
    return " ".join(f"{(a - b) / MIB:.1f}" for a, b in zip(larger, smaller, strict=True))


def main() -> None:
    what = asked(__doc__ or "", 1)
    budget = 8 * MIB
    rows, numbers = [], {}
    for rule in RULES:
        found = largest(rule, budget, 8 if rule[2] > 1 else 32)
        told, least = needed(rule, found), needed(rule, rule[2])
        written, peak = measured(rule, found)
        written_least, peak_least = measured(rule, rule[2])
        rows.append(
            [
                f"{rule[0]} {rule[1]}" + (f", M = {rule[2]}" if rule[2] > 1 else ""),
                str(found),
                " ".join(f"{value / MIB:.1f}" for value in told),
                beyond(told, least),
                beyond(written, written_least),
                beyond(peak, peak_least),
            ]
        )
        both = {"ledger": (told, least), "private": (written, written_least), "peak rss": (peak, peak_least)}
        numbers[" ".join(map(str, rule))] = {"rows": found, **both}
    columns = ["rule", "largest batch, rows", "ledger by worker, MiB"]
    columns += [f"{what}, beyond the least, MiB" for what in ("ledger", "written", "resident at most")]
    fits = f"Budget: {budget / MIB:.0f} MiB per worker.\n\n" + table(columns, rows)
    stages, numbers["weights in a file"] = held(30)
    report(what, f"{fits}\n\nWeights in a file:\n\n{table(COLUMNS, stages)}", numbers)


if __name__ == "__main__":
    main()
