"""Seconds and updates to a loss: `ravnest`, `pipedream` and `1f1b` on three peers with lines of 100 Mbit/s and 40 ms.

Handwritten digits, plain stochastic gradient descent, the same stages and batches for all; `1f1b` cuts a batch into 4
micro-batches. Each rule has that of three learning rates with which it takes the fewest updates with the first seed:
where the order is free in a run on the bed, else, as it depends on no clock, in one without. Then `roundelay host` and
`join` train with three seeds. The loss is the mean of ten batches; seconds count from the first update.

From the traces: the greatest staleness of each stage (the paper's Fig. 3), the share of its time that each is busy
(Fig. 1), and whether a stage's updates are as many as its letters B (Eq. 4).

    .venv/bin/python -m benchmarks.peers.time_to_loss [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.peers.forked import over_grpc, replaced
from benchmarks.peers.hosted import Hosted, hosted, staleness
from benchmarks.peers.jobs import digits
from roundelay.planner.cluster import Cluster, ClusterLink, ClusterLinks, ClusterWorker
from roundelay.session.training import Length, Session
from tests.wan.bed import Bed, Unusable

PEERS, MBIT_PER_S, RTT_MS = 3, 100, 40
RULES: Mapping[str, int] = {"ravnest": 1, "pipedream": 1, "1f1b": 4}
"""Rule to micro-batches of a batch."""

RATES = (0.1, 0.2, 0.4)
TARGET, SMOOTH, MOST, MORE = 0.3, 10, 400, 1.4
SEEDS, JOB = 3, Path(digits.__file__)

LINK = ClusterLink(latency_s=RTT_MS / 2e3, bytes_per_s=0.965e6 * MBIT_PER_S / 8)
CLUSTER = Cluster(
    workers=tuple(ClusterWorker(f"w{k}", k, 1.0, node=str(k)) for k in range(PEERS)),
    links=ClusterLinks(within=LINK, between=LINK),
    ordered=True,
)
"""As `roundelay host` measures it, where it does so well."""


def updates_to(losses: Sequence[float]) -> int | None:
    """Updates until the loss is reached; None if it is not."""
    for end in range(SMOOTH, len(losses) + 1):
        if statistics.fmean(losses[end - SMOOTH : end]) <= TARGET:
            return end
    return None


def best_rate(bed: Bed, rule: str) -> tuple[float, int]:
    """The learning rate that takes the fewest updates, and these."""
    found = {rate: updates_to(_losses(bed, rule, rate)) or MOST for rate in RATES}
    rate = min(found, key=lambda rate: found[rate])
    return rate, found[rate]


def _losses(bed: Bed, rule: str, rate: float) -> list[float]:
    """The losses of a run without a host: on the bed where the order is free, else by threads of this process."""
    free = rule == "ravnest"
    job = digits.made(0, rate)
    captured = roundelay.capture(job)
    plan = roundelay.plan(
        job,
        captured=captured,
        workers=PEERS,
        rule=rule,
        micro_batches=RULES[rule],
        cuts=digits.CUTS,
        threads=1,
        transport="grpc" if free else "memory",
        cluster=CLUSTER if free else None,
    )
    with replaced("grpc", over_grpc(bed)):
        session = Session(job, captured, plan, 0, Length(steps=MOST))
        return [update.loss for update in session.run(notify=lambda event: None, gathers="nothing").updates]


def seconds_to(run: Hosted, updates: int | None) -> float | None:
    """Seconds from the first update to that with which the loss is reached."""
    return None if updates is None else run.updates[updates - 1]["seconds"] - run.updates[0]["seconds"]


def row_of(rule: str, rate: float, runs: Sequence[Hosted]) -> list[str]:
    """What came of a rule."""
    reached = [updates_to([update["loss"] for update in run.updates]) for run in runs]
    seconds = [seconds_to(run, updates) for run, updates in zip(runs, reached, strict=True)]
    lasts = [run.updates[-1]["seconds"] - run.updates[0]["seconds"] for run in runs]
    pace = statistics.median((len(run.updates) - 1) / last for run, last in zip(runs, lasts, strict=True))
    busy = [statistics.median(run.summary["busy"][k] for run in runs) for k in range(PEERS)]
    return [
        rule,
        f"{rate:g}",
        ", ".join("not reached" if one is None else str(one) for one in reached),
        ", ".join("not reached" if one is None else f"{one:.1f}" for one in seconds),
        f"{pace:.1f}",
        ", ".join(f"{one:.2f}" for one in busy),
    ]


def told_of_letters(runs: Sequence[Hosted]) -> str:
    """Greatest and median staleness by stage beside what the plan allows, and whether Eq. 4 holds."""
    lines = []
    for k in range(PEERS):
        stale = [staleness(run.letters()[k]) for run in runs]
        allowed = ", ".join(str(run.plan["stages"][k]["in_flight"] - 1) for run in runs)
        most = ", ".join(str(max(own)) for own in stale)
        median = ", ".join(f"{statistics.median(own):g}" for own in stale)
        lines.append([str(k), most, median, allowed])
    equal = all(own.count("B") == len(run.updates) for run in runs for own in run.letters())
    text = table(["stage", "greatest staleness, by seed", "median", "plan allows"], lines)
    return (
        f"{text}\n\nLetters B are as many as updates, on every stage of every run (Eq. 4): {'yes' if equal else 'NO'}."
    )


def main() -> None:
    """Run, and print tables."""
    what = asked(__doc__ or "", repeats=SEEDS)
    seeds = range(1 if what.short else what.repeats)
    rows, found, letters = [], dict[str, Any](), ""
    with tempfile.TemporaryDirectory() as folder, Bed(PEERS, mbit_per_s=MBIT_PER_S, rtt_ms=RTT_MS) as bed:
        for rule, micro_batches in RULES.items():
            rate, updates = best_rate(bed, rule)
            options = ["--rule", rule, "--micro-batches", str(micro_batches), "--cuts", digits.CUTS]
            options += ["--steps", str(min(MOST, round(MORE * updates)))]
            runs = []
            for seed in seeds:
                env = {"RATE": str(rate), "SEED": str(seed)}
                runs.append(hosted(bed, PEERS, JOB, Path(folder) / f"{rule}-{seed}", options, env))
            rows.append(row_of(rule, rate, runs))
            found[rule] = [[(update["seconds"], update["loss"]) for update in run.updates] for run in runs]
            letters = told_of_letters(runs) if rule == "ravnest" else letters
    head = ["rule", "rate", f"updates to a loss of {TARGET}, by seed", "seconds, by seed", "updates per second"]
    text = f"{table([*head, 'busy share by stage'], rows)}\n\n`ravnest`:\n\n{letters}"
    report(what, text, {"seconds and losses": found})


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(str(error))
