"""The graphs of every model of the zoo and of every program, written down, to be compared after a change of capture.

What a capture finds must not depend on how it computes it. Before such a change::

    python -m tests.frontend.same_graphs --write graphs.json

and after it, which lists every field that differs and ends with 1 if any does::

    python -m tests.frontend.same_graphs --against graphs.json

Written are all fields of the graph, in fp32 and bf16; what the capture knows beside it (which buffers and batch fields
are written, what the loss reads, which slots change); into how many parts a batch may be cut; or the error's type and
words where a job is refused. A file holds the commit that it was made at. ``--only TEXT`` takes the names with that
text in them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import roundelay
from roundelay.errors import RoundelayError
from roundelay.frontend import Captured, capture, describe_graph
from roundelay.job import Job
from roundelay.planning.batch_divisibility import batch_divisibility
from tests.programs import buffers, calls, losses, results, states, weights  # noqa: F401  they fill the table
from tests.programs.plain import fresh
from tests.programs.table import PROGRAMS
from tests.zoo import MODELS, Entry

PARTS = 4
FIRST = 4
"""Batches that are looked at where one is to be cut."""

Found = dict[str, Any]


def described(captured: Captured, first: list[Any]) -> Found:
    """All that a capture finds, as plain data."""
    reads, effects = captured.builder.loss.reads, captured.effects
    changed = (effects.of_forward, effects.of_loss)
    return {
        "fp32": asdict(captured.graph),
        "bf16": tried(lambda: asdict(captured.lowering("bf16").graph)),
        "mutated": sorted(captured.builder.mutated),
        "writes": [list(effects.written_by_inputs), list(effects.written_by_forward)],
        "reads": f"{reads} {reads.metrics} {None if reads.labels is None else reads.labels.output}",
        "changed": [[re.sub(r"\d+", "", one.slot.path) for one in changes] for changes in changed],
        "metric_state": effects.read_by_metric,
        "parts": tried(lambda: asdict(batch_divisibility(captured, first, PARTS))),
    }


def tried(call: Callable[[], Found]) -> Found:
    """What it returns, or how it fails; without addresses, which differ from run to run."""
    try:
        return call()
    except RoundelayError as error:
        words = f"{type(error).__name__}: {error}".replace(f"{Path.cwd()}/", "")  # of another commit's folder
        return {"refused": re.sub("0x[0-9a-f]+", "0x", words)}
    except Exception as error:
        return {"fails": re.sub("0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error!s:.200}")}


def of_entry(entry: Entry) -> Found:
    """What capture finds in a model of the zoo."""
    first = entry.batches(1, FIRST)
    return described(capture(entry.build(0), entry.loss, first[0], entry.inputs), list(first))


def of_program(job: Job) -> Found:
    """What the whole of capturing finds in a program, or the words in which it is refused."""
    captured = roundelay.capture(job)
    return described(captured, [batch for batch, _ in zip(job.batches(0), range(FIRST), strict=False)])


def every(only: str) -> Iterator[tuple[str, Found]]:
    """Name and findings of every model and program with this text in its name."""
    for name, entry in MODELS.items():
        if only in f"zoo.{name}":
            yield f"zoo.{name}", tried(lambda entry=entry: of_entry(entry))  # type: ignore[misc]
    for name, program in PROGRAMS.items():
        if only in name:
            yield name, tried(lambda program=program: of_program(fresh(program.make)))  # type: ignore[misc]


def differences(one: Any, two: Any, path: str = "") -> Iterator[str]:
    """Every place in which two of them differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys((*one, *two)):
            yield from differences(one.get(key), two.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif one != two:
        yield f"{path}: {one!r:.200}, now {two!r:.200}"


def main() -> int:
    """Write the graphs, or compare them with those of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--light", action="store_true", help="as for samples of few bytes, as these are")
    asked = parser.parse_args()
    describe_graph.LIGHT_BYTES = describe_graph.LIGHT_BYTES if asked.light else 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = json.loads(json.dumps(dict(every(asked.only))))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    if asked.write:
        asked.write.write_text(json.dumps({"commit": commit, "graphs": found}, indent=1))
    if not asked.against:
        return 0
    before = json.loads(asked.against.read_text())
    known = {name: graph for name, graph in before["graphs"].items() if asked.only in name}
    lines = list(differences(known, found))
    sys.stdout.write("\n".join([*lines, f"{len(found)} graphs, {len(lines)} differences from {before['commit']}\n"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
