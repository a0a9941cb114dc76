"""Ravnest's assumptions and claims about one pipeline, measured: staleness, gradients, memory and busy shares.

Three workers of this machine learn handwritten digits by rule `ravnest` and plain stochastic gradient descent. Printed
are

- of the letters that each stage wrote down: staleness (the paper's Fig. 3) beside what the plan allows, and whether a
  stage's updates are as many as its letters B (Eq. 4). Exit code 1 if a stage had more forwards in flight than planned,
  if as many updates as those or more came between a forward and its backward, if the last stage was stale at all, or if
  the counts differ;
- what Sect. 3.4 assumes to be bounded, at the start and after each epoch, in plain PyTorch, over the batches that come
  next and over all data. It is measured along the way of the run, so a true bound is not below it;
- each worker's planned bytes beside the measured ones (Eq. 16);
- how busy three stages that sleep are, by this rule and by others (Fig. 1).

    .venv/bin/python -m benchmarks.peers.assumptions [--repeats 1] [--short] [--anyway] [--out FILE]

Needs scikit-learn. The short form leaves the transport grpc out, and is shorter.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.peers import busy
from benchmarks.peers.bounds import (
    Spread,
    block_lipschitz,
    global_delays,
    lipschitz,
    most_in_flight,
    spread_of,
)
from benchmarks.peers.hosted import Hosted, staleness
from benchmarks.peers.jobs import digits
from examples.digits import pictures
from roundelay.planning.planning import fitted
from roundelay.session.run_summary import spans_of

STAGES, RATE = 3, 0.1
FULL, SHORT = (("shm", "grpc"), 8, 200), (("shm",), 3, 80)
"""Transports, epochs, and micro-batches of the stages that sleep."""

HOLDS = "Every stage is within what the plan allows, the last is never stale, and letters B are as many as updates."
NOT_MEASURED = (
    "Not measured: assumption 4, Eq. (11), as one cluster averages with no other; and 6, as the order of the batches "
    "depends on seed and epoch alone."
)


@dataclass(frozen=True, slots=True)
class Letters:
    """What a stage's letters say.

    Args:
        stale: greatest number of its updates between a forward and its own backward.
        mean: of that number.
        most: forwards in flight at one time.
        allowed: forwards in flight by the plan.
        delay: greatest number of updates of all stages between a forward and its own update.
        backwards: letters B.
        updates: of the run.
    """

    stale: int
    mean: float
    most: int
    allowed: int
    delay: int
    backwards: int
    updates: int

    def broken(self, *, last: bool) -> list[str]:
        """What does not hold of it."""
        checks = {
            f"{self.most} forwards in flight, {self.allowed} planned": self.most <= self.allowed,
            f"stale by {self.stale} updates with {self.most} forwards in flight": self.stale < self.most,
            f"stale by {self.stale} updates at the last stage": not last or self.stale == 0,
            f"{self.backwards} letters B, {self.updates} updates": self.backwards == self.updates,
        }
        return [text for text, holds in checks.items() if not holds]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is assumed to be bounded, of one run; of the lists one number for each point, or for each two in a row.

    Args:
        norms: of the gradient of all data.
        spreads: of the gradients for batches around it.
        whole: Lipschitz ratios.
        blocks: the same of each stage's weights alone.
    """

    norms: list[float]
    spreads: list[Spread]
    whole: list[float]
    blocks: list[list[float]]


@dataclass(frozen=True, slots=True)
class Found:
    """What has come of one run.

    Args:
        name: transport and seed.
        letters: by stage.
        bounds: of its gradients.
        memory: by worker, of the run's summary.
    """

    name: str
    letters: list[Letters]
    bounds: Bounds
    memory: list[dict[str, Any]]


def run_of(transport: str, seed: int, epochs: int, folder: Path) -> Found:
    """Train, and measure.

    Raises:
        RuntimeError: the last weights that were evaluated are not those of the run's checkpoint.
    """
    points: list[Tensor] = []

    def seen(model: nn.Module) -> dict[str, float]:
        points.append(parameters_to_vector(model.parameters()).detach().clone())
        return {"loss": float(digits.loss(model(pictures()[0][0]), pictures()[0]))}

    job = digits.made(seed, RATE, seen)
    points.append(parameters_to_vector(job.model.parameters()).detach().clone())
    captured = roundelay.capture(job)
    choices = {"workers": STAGES, "rule": "ravnest", "micro_batches": 1, "cuts": digits.CUTS, "threads": 1}
    plan = roundelay.plan(job, captured=captured, transport=transport, **choices)
    out = folder / f"{transport}-{seed}"
    trained = roundelay.train(job, plan=plan, seed=seed, epochs=epochs, out=out, progress=False)
    last = parameters_to_vector(roundelay.load(digits.model(), out).parameters())
    if len(points) != epochs + 1 or not torch.equal(points[-1], last):
        raise RuntimeError("the weights evaluated after the last epoch are not those of the checkpoint")
    run = Hosted(out, "")
    delays = global_delays(spans_of(trained), STAGES)
    own = [letters_of(text, plan.stages[k].in_flight, delays[k], run) for k, text in enumerate(run.letters())]
    blocks = [set(stage.parameters) for stage in fitted(captured, plan).stages]
    return Found(f"{transport}, seed {seed}", own, bounds_of(points, blocks, seed), run.summary["memory"])


def letters_of(letters: str, allowed: int, delays: Sequence[int], run: Hosted) -> Letters:
    """What a stage's letters say."""
    stale = staleness(letters)
    mean, backwards = statistics.fmean(stale), letters.count("B")
    return Letters(max(stale), mean, most_in_flight(letters), allowed, max(delays), backwards, len(run.updates))


def bounds_of(points: Sequence[Tensor], blocks: Sequence[set[str]], seed: int) -> Bounds:
    """What is assumed to be bounded, at the weights after each epoch of a run.

    Args:
        points: weights, each one row of numbers.
        blocks: names of each stage's parameters.
        seed: of the run.
    """
    model = digits.model()
    named = list(model.named_parameters())
    masks = [torch.cat([torch.full((p.numel(),), name in own) for name, p in named]) for own in blocks]

    def at(weights: Tensor, batch: digits.Batch) -> Tensor:
        vector_to_parameters(weights, model.parameters())
        return digits.gradient_of(model, batch)

    def of_all(weights: Tensor) -> Tensor:
        return at(weights, pictures()[0])

    full = [of_all(weights) for weights in points]
    spreads = [
        spread_of(full[k], (at(weights, batch) for batch in digits.batches(seed, k)))
        for k, weights in enumerate(points)
    ]
    own = [[block_lipschitz(of_all, a, b, mask) for a, b in pairwise(points)] for mask in masks]
    return Bounds([float(gradient.norm()) for gradient in full], spreads, lipschitz(points, full), own)


def table_of_letters(found: Sequence[Found]) -> str:
    """Fig. 3 and Eq. 4."""
    rows = [
        [
            run.name,
            str(k),
            f"{own.stale}, {own.mean:.2f}",
            f"{own.most} of {own.allowed}",
            str(own.delay),
            f"{own.backwards}, {own.updates}",
        ]
        for run in found
        for k, own in enumerate(run.letters)
    ]
    head = ["run", "stage", "staleness: greatest, mean", "forwards in flight: most, of planned"]
    return table([*head, "greatest delay in k, all stages' updates", "letters B, updates"], rows)


def table_of_bounds(found: Sequence[Found]) -> str:
    """Sect. 3.4, Assumption 1."""
    rows = []
    for run in found:
        own = run.bounds
        stale, delay = max(one.stale for one in run.letters), max(one.delay for one in run.letters)
        blocks = ", ".join(f"{max(block):.3g}" for block in own.blocks)
        bias = [spread.bias for spread in own.spreads]
        rows += [
            [run.name, "1, Eqs. (5), (6): unbiased", "norm of (mean over an epoch - gradient)", *_ends(bias)],
            ["", "2, Eq. (7): Lipschitz", "change of the gradient / of all weights", *_ends(own.whole)],
            ["", "2, Eq. (8), taken as: by block", "the same of one stage's weights; by stage", blocks, ""],
            ["", "3, Eq. (9): variance", "mean squared norm", *_ends([spread.variance for spread in own.spreads])],
            ["", "3, Eq. (10): gradient", "norm, all data", *_ends(own.norms)],
            ["", "3, Eq. (10): gradient", "norm, one batch", *_ends([spread.largest for spread in own.spreads])],
            ["", "5: delay", "updates of its stage; of all stages", f"{stale}; {delay}", ""],
        ]
    return table(["run", "assumption", "measured", "greatest", "at the start, at the end"], rows)


def _ends(values: Sequence[float]) -> list[str]:
    return [f"{max(values):.3g}", f"{values[0]:.3g}, {values[-1]:.3g}"]


def table_of_memory(found: Sequence[Found]) -> str:
    """Eq. (16)."""
    rows = []
    for run in found:
        for k, own in enumerate(run.memory):
            planned, tensors = own["predicted"], own["peak_tensor_bytes"]
            items = [planned["weights"] + planned["gradients"], planned["versions"], planned["tapes"], planned["total"]]
            private = "" if own["private_bytes"] is None else _mib(own["private_bytes"])
            share = f"{_mib(tensors)} ({tensors / planned['total']:.2f})"
            rows.append([run.name, str(k), *map(_mib, items), share, private])
    head = ["run", "worker", "planned MiB: weights and gradients", "older versions", "tapes", "in all, with messages"]
    return table([*head, "measured peak of tensors (of planned)", "private bytes of the process"], rows)


def _mib(number: int) -> str:
    return f"{number / 2**20:.2f}"


def table_of_busy(found: Sequence[busy.Busy]) -> str:
    """Fig. 1."""
    rows = [[own.rule, str(own.micro_batches), *map(_shares, (own.simulated, own.measured))] for own in found]
    return table(["rule", "micro-batches of a batch", "busy, simulated, by stage", "busy, measured"], rows)


def _shares(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def main() -> int:
    """Run, and print tables; the exit code."""
    what = asked(__doc__ or "", repeats=1)
    transports, epochs, slept = SHORT if what.short else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = [run_of(t, seed, epochs, Path(folder)) for t in transports for seed in range(what.repeats)]
    shares = [busy.busy_of(rule, micro_batches, "shm", slept) for rule, micro_batches in busy.RULES]
    broken = [
        f"{run.name}, stage {k}: {text}"
        for run in found
        for k, own in enumerate(run.letters)
        for text in own.broken(last=k == STAGES - 1)
    ]
    parts = [table_of_letters(found), "\n".join(broken) or HOLDS, table_of_bounds(found), NOT_MEASURED]
    parts += [table_of_memory(found), table_of_busy(shares)]
    report(what, "\n\n".join(parts), {"runs": [asdict(run) for run in found], "busy": [asdict(own) for own in shares]})
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
