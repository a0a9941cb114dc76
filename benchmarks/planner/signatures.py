"""Signatures on a thousand workers: a GPT of 12 layers on a mesh of 8 x 8 x 16, and GPT-3 on 128 hosts of 8, in stages.

Both are declared (`declared_gpt.py`), the second as two layers that stand for 96. Workers compute 150 Tflop/s; links
take 5 microseconds and 200 GB/s within a host, 15 microseconds and 20 GB/s between hosts. Of GPT-3 stages, hosts of
each and rows of a micro-batch are searched too, with 80 and 40 GB of memory. Prices are a model's: nothing is
measured but the seconds of the search, once each.
"""

from __future__ import annotations

import time

from benchmarks.common import asked, report, table
from benchmarks.planner.declared_gpt import Gpt, declared, layered, profile
from benchmarks.planner.stages_on_hosts import Hosts, Stage, pipeline
from roundelay.errors import PlanError
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.searched import signatures_on

FLOPS_PER_S = 1.5e14
INSIDE, BETWEEN = Link(5e-6, 2e11), Link(15e-6, 2e10)
MESH, LINKS = {"x": 8, "y": 8, "hosts": 16}, {"x": INSIDE, "y": INSIDE, "hosts": BETWEEN}
TWELVE = Gpt(width=4096, layers=12, heads=32, symbols=50304, length=1024, rows=128)
ROWS, MEMORIES = 1536, (80, 40)


def twelve_layers() -> list[str]:
    """Without stages."""
    facts = declared(TWELVE)
    began = time.perf_counter()
    found = signatures_on(facts, MESH, LINKS, profile(facts, FLOPS_PER_S))
    took = time.perf_counter() - began
    axes = " x ".join(f"{axis} {size}" for axis, size in found.mesh.items())
    space = f"10^{len(str(found.space)) - 1}"
    return [
        "12 layers",
        f"{found.seconds * 1e3:.2f} ms",
        f"{found.gap:.2%}",
        f"{took:.0f}",
        f"{axes}; of {space} choices",
    ]


def gpt_3(memory: int) -> list[str]:
    """In stages, on workers with so many GB."""
    hosts = Hosts(128, 8, INSIDE, BETWEEN, memory * 10**9)
    name = f"GPT-3, {memory} GB"
    began = time.perf_counter()
    try:
        found = pipeline(layered(Gpt(), FLOPS_PER_S), hosts, ROWS)
    except PlanError as error:
        return [name, error.got, "", f"{time.perf_counter() - began:.0f}", ""]
    took = time.perf_counter() - began
    chosen = f"{found.micro_batches} micro-batches of {found.rows}; {_runs(found.stages)}"
    return [name, f"{found.seconds:.3f} s", f"{found.gap:.2%}", f"{took:.0f}", chosen]


def _runs(stages: tuple[Stage, ...]) -> str:
    """Stages as layers on hosts, those that follow one another and are alike together."""
    runs: list[tuple[int, str]] = []
    for stage in stages:
        own = f"{stage.layers} on {stage.hosts}"
        count = runs.pop()[0] if runs and runs[-1][1] == own else 0
        runs.append((count + 1, own))
    return ", ".join(f"{count} x {own}" if count > 1 else own for count, own in runs)


def main() -> None:
    what = asked(__doc__ or "")
    rows = [twelve_layers(), *map(gpt_3, MEMORIES[:1] if what.short else MEMORIES)]
    report(what, table(["", "a batch", "gap", "searched in s", "found"], rows), {"rows": rows})


if __name__ == "__main__":
    main()
