"""Wide & Deep with tables of several sizes (OneFlow, Fig. 13): whole on both processes, divided by rows, by columns.

The model of ``examples/wide_and_deep.py``, trained by Adagrad with batches of 256 clicks on two processes over shm, one
thread each. Whole: ``--data-parallel 2``, where the table's gradient is summed. Divided: the table's rows (S(0)) or its
columns (S(1)) on each, the layers on half of the clicks. Then a large softmax: ``examples/face_recognition.py`` with
its classes on both processes, or divided.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.two_processes import planned, update_ms
from examples import face_recognition, wide_and_deep
from roundelay import Job
from roundelay.env import better_malloc
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.sbp import parse
from roundelay.session.training import Session

VOCABULARIES = (20_000, 100_000, 400_000, 1_600_000)
IDENTITIES = (10_000, 40_000)
LIMIT = 512 * 2**20
"""Bytes that a worker may have of weights, gradients and states, for the column that says what still fits."""

ROWS = (("devices", parse("S(0)")),)
DEEP = {"deep.*": ROWS, "wide": ROWS}


def tables(vocabulary: int, steps: int, way: str) -> Session:
    torch.manual_seed(0)
    batches = list(wide_and_deep.clicks(0, vocabulary))[:steps]
    split = None if way == "whole" else {"table.weight": (("devices", way),)}
    return _planned(wide_and_deep.WideAndDeep(vocabulary), batches, partial(Adagrad, lr=0.01), split, DEEP)


def classes(identities: int, steps: int, way: str) -> Session:
    torch.manual_seed(0)
    model = face_recognition.Recogniser(identities)
    batches = list(face_recognition.faces(0, identities))[:steps]
    split = None if way == "whole" else {"head.weight": (("devices", way),)}
    return _planned(model, batches, partial(SGD, lr=0.01, momentum=0.9), split, {"backbone.*": ROWS})


def _planned(
    model: nn.Module, batches: list[Any], optimizer: Callable[..., Any], split: Any, outputs: dict[str, Any]
) -> Session:
    job = Job(
        model=model,
        inputs=lambda batch: (batch, {}),
        loss=lambda loss, batch: loss,
        batches=lambda epoch: batches,
        optimizer=optimizer,
    )
    if split is None:
        return planned(job, len(batches), data_parallel=2, transport="shm")
    own = GivenSignatures({"devices": 2}, split, outputs)
    return planned(job, len(batches), signatures=own, transport="shm")


@cache
def session(make: Callable[[int, int, str], Session], size: int, steps: int, way: str) -> Session:
    return make(size, steps, way)


def main() -> None:
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(__doc__ or "", 5)
    torch.set_num_threads(1)
    steps = 15 if what.short else 30
    kinds = ((tables, VOCABULARIES, ("whole", "S(0)", "S(1)")), (classes, IDENTITIES, ("whole", "S(0)")))
    candidates: dict[str, Callable[[], float]] = {}
    sessions: dict[str, Callable[[], Session]] = {}
    for make, sizes, ways in kinds:
        for size in sizes[:1] if what.short else sizes:
            for way in ways:
                name = f"{size:,} {'features' if make is tables else 'identities'}: {way}"
                sessions[name] = partial(session, make, size, steps, way)
                candidates[name] = lambda own=sessions[name]: update_ms(own())  # type: ignore[misc]
    found = alternate(candidates, what.repeats)
    rows = [[name, *_row(sessions[name]().plan, values)] for name, values in found.items()]
    report(
        what, table(["", "ms per update", "MiB of weights, gradients, states", "MiB sent", "fits"], rows), {"ms": found}
    )


def _row(plan: Any, values: list[float]) -> list[str]:
    (stage,) = plan.stages
    held = 3 * stage.parameter_bytes  # both optimizers have one state for each weight
    sent = sum(sum(e.bytes_sent(2, 0)) for e in plan.exchanges)
    return [
        spread(values),
        f"{held / 2**20:.1f}",
        f"{sent / 2**20:.2f}",
        "yes" if held <= LIMIT else "no",
    ]


if __name__ == "__main__":
    main()
