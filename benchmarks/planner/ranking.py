"""Do predictions rank real plans? Plans of one rule, number of micro-batches and workers, drawn by a seed, are run.

For each job: plans on two workers over shared memory, pipelines with other cuts, replicas with ZeRO 0 to 3, a mesh,
each also with recomputation. Told are predicted and measured seconds of a batch, the rank correlation (Spearman) of the
two, and the regret: what the plan takes that is predicted to be the fastest, over what the fastest takes. The machine's
profile is measured before, and not with these jobs. Ablations: one α and one β for all exchanges, exchanges that take
no CPU time, and no profile.

    .venv/bin/python -m benchmarks.planner.ranking [--plans 30] [--seed 1] [--seconds 2] [--jobs gpt mlp] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from benchmarks.common import machine, table
from roundelay import Job
from roundelay.calibration.calibrate import calibrate
from roundelay.env import better_malloc
from roundelay.errors import RoundelayError
from roundelay.finals.short_run import ShortRun
from roundelay.ir.graph import Graph
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import priced
from roundelay.planner.prove_plan import prove
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.machine_profiles import found_profile, keep_profile
from roundelay.search.search import shown

WORKERS, MICRO_BATCHES, NEAR = 2, 4, 1.5


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int, width: int, words: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.blocks(self.words(ids))).flatten(0, 1)


def gpt() -> Job:
    """Bound by computation: 3.3 million parameters, 16 x 64 tokens."""
    return job_of(GPT(4, 256), lambda chance: torch.randint(256, (16, 64), generator=chance), 256)


def mlp() -> Job:
    """Bound by communication: 12.6 million parameters, 32 rows."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(12)]
    return job_of(nn.Sequential(*layers), lambda chance: torch.randn(32, 1024, generator=chance), 1024)


JOBS = {"gpt": gpt, "mlp": mlp}


def job_of(model: nn.Module, inputs: Any, classes: int) -> Job:
    chance = torch.Generator().manual_seed(1)
    data = []
    for _ in range(4):
        x = inputs(chance)
        labels = x.shape if x.dtype == torch.int64 else x.shape[:1]
        data.append((x, torch.randint(classes, labels, generator=chance)))

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[1].flatten())

    return Job(model=model, loss=loss, batches=lambda epoch: data, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4))


def drawn(graph: Graph, count: int, seed: int) -> list[Choices]:
    """So many plans."""
    chance = random.Random(seed)
    own = Choices(rule="1f1b", micro_batches=MICRO_BATCHES, transport="shm", threads=1, workers=1)
    kinds = [
        replace(own, data_parallel=WORKERS, zero=level, micro_batches=MICRO_BATCHES // WORKERS) for level in range(4)
    ]
    kinds.append(replace(own, tensor_parallel=WORKERS))
    legal = [graph.ops[i].name for i in graph.cuts]
    cuts = chance.sample(legal, min(len(legal), count))
    kinds += [replace(own, workers=WORKERS, cuts=name) for name in cuts]
    every = [replace(one, recompute=modules) for modules in ("none", "all") for one in kinds]
    must, rest = every[:5], every[5:]
    return must + chance.sample(rest, min(len(rest), count - len(must)))


def measured(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Plans with predicted and measured seconds of a batch."""
    torch.manual_seed(0)
    job = JOBS[name]()
    captured = roundelay.capture(job)
    facts: ModelFacts = collect_facts(Examined(job, captured, 0, lambda *_: None), threads=(1,))
    short, plans, profiles = ShortRun(job, captured, 0, args.seconds), [], variants()
    for choices in drawn(captured.graph, args.plans, args.seed):
        try:
            made = {name: priced(facts, choices, hardware_here(), one) for name, one in profiles.items()}
            prove(made["profile"].plan)
        except RoundelayError:
            continue
        plans.append((choices, made))
    best = [float("inf")] * len(plans)
    for _ in range(2):  # disturbances only add to what a run takes
        for k, (_, made) in enumerate(plans):
            best[k] = min(best[k], short.batch_s(made["profile"].plan))
    for (choices, made), seconds in zip(plans, best, strict=True):
        yield {"plan": shown(choices), "measured_s": seconds} | {name: one.batch_s for name, one in made.items()}


def variants() -> dict[str, MachineProfile | None]:
    """The machine's profile, and its ablations."""
    profile = found_profile("shm", WORKERS, 1)
    if profile is None:
        profile = calibrate(workers=WORKERS, transport="shm", threads=1)
        keep_profile(profile)
    single, free = profile.single_line(), profile.without_cpu()
    return {"profile": profile, "one line": single, "no CPU": free, "no profile": None}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    count = len(first)
    return 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (count * (count * count - 1))


def judged(rows: Sequence[dict[str, Any]], column: str) -> tuple[float, float]:
    """Rank correlation and regret."""
    predicted, real = ([row[name] for row in rows] for name in (column, "measured_s"))
    chosen = real[predicted.index(min(predicted))]
    return spearman(predicted, real), chosen / min(real)


def main() -> None:
    """Run, and print a table for each job."""
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in args.jobs:
        rows = sorted(measured(name, args), key=lambda row: row["measured_s"])
        found[name] = rows
        names = ["measured_s", "profile", "one line", "no CPU", "no profile"]
        cells = [[*(f"{1e3 * row[column]:.1f}" for column in names), row["plan"]] for row in rows]
        near = sum(row["measured_s"] < NEAR * rows[0]["measured_s"] for row in rows)
        print(table([f"{name}: measured ms", *names[1:], "plan"], cells))
        told = f"{len(rows)} plans, {near} within {NEAR} x of the best"
        print(f"\n{told}")
        for column in names[1:]:
            correlation, regret = judged(rows, column)
            print(f"{column}: Spearman {correlation:.3f}, regret {regret:.3f}")
    print(machine())
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
