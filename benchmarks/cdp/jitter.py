"""Jitter: how long a step of cyclic data parallelism is where durations vary, beside synchronous data parallelism.

N equal stages on N workers in the layout `dp`. `1f1b` is data parallelism as torch's DistributedDataParallel does it: a
stage's gradients are all-reduced while earlier stages' backwards go on. The floor is the slowest worker's own mean.
With `--real`, four processes that sleep, instead of the simulator; then also the options of every benchmark: `--short`,
`--repeats`, `--anyway`, `--out`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.cdp import jitter_real
from benchmarks.cdp.jitter_durations import KINDS, RULES, Kind, Variation
from benchmarks.cdp.jitter_simulated import Case, Measured, measure
from benchmarks.common import asked, table

SIZES, TRANSFERS, SIGMAS = (4, 8, 16, 64), (0.0, 0.5), (0.1, 0.2, 0.3)
BATCHES = 40

Found = dict[Case, Measured]
Pick = Callable[[Measured], float]
Row = tuple[Kind, int, float]
"""Of a table: what varies, N, and c."""


def cases(sizes: Iterable[int], seeds: int) -> list[Case]:
    """Every simulation, the longest first."""
    return [
        Case(size, rule, transfer, variation, BATCHES, seed)
        for size in sorted(sizes, reverse=True)
        for transfer in TRANSFERS
        for kind in KINDS
        for variation in variations(kind)
        for rule in RULES.values()
        for seed in range(seeds if variation.sigma else 1)
    ]


def variations(kind: Kind) -> list[Variation]:
    """Of each sigma; without variation there is one."""
    return [Variation()] if kind == "none" else [Variation(kind, sigma) for sigma in SIGMAS]


def simulated(every: Sequence[Case]) -> Found:
    """Simulate on all cores, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return dict(zip(every, pool.map(measure, every), strict=True))


def cell(found: Found, row: Row, rule: str, pick: Pick, form: str) -> str:
    """A number for each sigma: the mean over the seeds."""
    return " / ".join(
        format(statistics.fmean(pick(found[case]) for case in found if _is(case, row, rule, variation)), form)
        for variation in variations(row[0])
    )


def _is(case: Case, row: Row, rule: str, variation: Variation) -> bool:
    return (variation.kind, case.size, case.transfer) == row and (case.rule, case.variation) == (rule, variation)


def lines(found: Found, pick: Pick, form: str, *, floor: bool = False) -> str:
    """A table of one measure."""
    rows: list[Row] = list(dict.fromkeys((case.variation.kind, case.size, case.transfer) for case in found))
    picks = [(title, rule, pick) for title, rule in RULES.items()]
    picks += [("floor", next(iter(RULES.values())), lambda one: one.floor)] if floor else []
    body = [
        [KINDS[row[0]], str(row[1]), f"{row[2]:g}", *(cell(found, row, rule, own, form) for _, rule, own in picks)]
        for row in sorted(rows, key=lambda row: (list(KINDS).index(row[0]), *row[1:]))
    ]
    return table(["variation", "N", "c", *(title for title, _, _ in picks)], body)


def tables(found: Found) -> str:
    """All measures."""
    sigmas = " / ".join(f"{sigma:.0%}" for sigma in SIGMAS)
    parts = [
        (f"Step over 2N time steps; sigma = {sigmas}", lines(found, lambda one: one.step, ".3f", floor=True)),
        ("Share of the time in which workers wait, %", lines(found, lambda one: 100 * one.waiting, ".1f")),
        ("Most bytes a worker begins to send in a time step, of a stage's", lines(found, lambda one: one.link, ".2f")),
        ("The same of all workers together, of a stage's on each", lines(found, lambda one: one.network, ".2f")),
    ]
    return "\n\n".join(f"{title}:\n\n{text}" for title, text in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=16, choices=SIZES, help="N at most; default: 16; 64 is long")
    parser.add_argument("--seeds", type=int, default=3, help="of durations, whose means are told; default: 3")
    parser.add_argument("--real", action="store_true", help="run four processes that sleep, instead of simulating")
    args, others = parser.parse_known_args()
    if args.real:
        sys.argv[1:] = others
        jitter_real.measure(asked(__doc__ or ""))
        return
    if others:
        parser.error(f"only with --real: {' '.join(others)}")
    print(tables(simulated(cases([size for size in SIZES if size <= args.largest], args.seeds))))


if __name__ == "__main__":
    main()
