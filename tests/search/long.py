"""The search against experts, brute force and an integer program: 200 random models and clusters, 200 graphs, and
GPTs of 2 and 12 layers on 2 x 4 workers. Ends with 1 if a check fails, and names it.

Run as ``python -m tests.search.long``; hours of one core. ``tests/search/test_checks.py`` has a sample of it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import torch

import roundelay
from benchmarks.tensor_parallel.run import data, loss_of, model
from roundelay.planner.cost_model import roofline
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.planning.on_mesh import mesh_facts, without_writes_of
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.problem import Machine, problem
from roundelay.search.signatures.tables import solve
from tests.search.checks import Found, no_expert_is_faster, signatures_are_the_best, tables_are_solved

MESH = {"data": 2, "tensor": 4}
LINKS = {"data": Link(15e-6, 2e10), "tensor": Link(5e-6, 2e11)}
LAYERS = (2, 12)
WIDTH, ROWS = 128, 16


def gpt(layers: int) -> MeshFacts:
    """Of a captured GPT."""
    job = roundelay.Job(
        model=model(WIDTH, layers),
        loss=lambda outputs, batch: loss_of(outputs, batch[1]),
        batches=lambda epoch: [data(ROWS)],
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
    return mesh_facts(without_writes_of(roundelay.capture(job)))


def of_gpts() -> Iterator[Found]:
    """Each with repeated modules alike and not, and in half of the memory that the fastest choice needs."""
    for layers in LAYERS:
        facts = gpt(layers)
        machine = Machine(MESH, LINKS, roofline(facts.graph))
        for tied in (True, False):
            found = tables_are_solved(problem(facts, machine, tied=tied).tables)
            yield found._replace(what=f"GPT of {layers} layers, {'tied' if tied else 'untied'}: {found.what}")
        tables = problem(facts, machine, variants=True).tables
        most = solve(tables).memory
        found = tables_are_solved(tables, most / 2)
        yield found._replace(what=f"GPT of {layers} layers, tied, half the memory: {found.what}")


def main() -> int:
    """Make all checks; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.long", description=__doc__)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first of each")
    given = parser.parse_args()
    graphs = filter(None, map(signatures_are_the_best, itertools.count(given.first)))
    models = map(no_expert_is_faster, range(given.first, given.first + given.models))
    failed = 0
    for kind, found in (("GPT", of_gpts()), ("graph", itertools.islice(graphs, given.graphs)), ("model", models)):
        for number, one in enumerate(found):
            failed += bool(one.complaint)
            print(f"{kind} {number}: {one.what}{f'; WRONG: {one.complaint}' * bool(one.complaint)}", flush=True)
    print(f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
