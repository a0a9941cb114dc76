"""Which update rule at which depth: what it trains, how fast its schedule lets workers be, what they hold.

A small GPT-2 of Hugging Face learns the next character of Python's own source text by every rule, on D workers, from
the same weights on the same batches; plain PyTorch beside it. The rate is the simulator's, with equal stages and free
messages, over that of ``1f1b``; activations and versions are its peaks on the worker that holds most. So nothing here
depends on how fast or how busy this machine is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import roundelay
from benchmarks.common import table
from examples.char_gpt import ALPHABET, CONTEXT, texts, windows
from roundelay import Job
from roundelay.ir.plan import Plan

WIDTH, LAYERS, ROWS, STEPS = 128, 8, 16, 150
RATE = 1e-3
DEPTHS = (2, 4, 8)
PLAIN = "plain PyTorch"
RULES: dict[str, tuple[str, Callable[[int], int]]] = {
    "`1f1b`, the default": ("1f1b", lambda depth: 2 * depth),
    "`zb-h1`": ("zb-h1", lambda depth: 2 * depth),
    "`rehearse`": ("rehearse", lambda depth: depth),
    "`lookahead`": ("lookahead", lambda depth: depth),
    "`pipeoptim`": ("pipeoptim", lambda depth: depth),
    "`pipeoptim`, M = 1": ("pipeoptim", lambda depth: 1),
    "`cdp-v2`": ("cdp-v2", lambda depth: depth),
    "`pipedream-2bw`": ("pipedream-2bw", lambda depth: depth),
    "`pipedream`, M = 1": ("pipedream", lambda depth: 1),
    "`async`": ("async", lambda depth: depth),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Of one rule at one depth.

    Args:
        losses: held-out loss at the end, of every seed.
        rate: batches per second over those of ``1f1b``.
        tapes: bytes of activations on the worker that holds most.
        versions: most versions of a stage's weights at one time.
    """

    losses: tuple[float, ...]
    rate: float
    tapes: int
    versions: int


def job(seed: int) -> Job:
    """The model and its batches, the same for the same seed."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": len(ALPHABET)}
    config = GPT2Config(
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        **sizes,
    )
    text, _ = texts()
    drawn = torch.Generator().manual_seed(seed)
    data = [windows(text, torch.randint(len(text) - CONTEXT, (ROWS,), generator=drawn)) for _ in range(STEPS)]
    return Job(
        model=GPT2LMHeadModel(config),
        loss=loss,
        inputs=lambda batch: ((), {"input_ids": batch["x"]}),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATE),
    )


def loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross entropy of the next character."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), batch["y"].flatten())


@torch.no_grad()
def held_out(model: torch.nn.Module) -> float:
    """Loss on text that was not trained on."""
    _, text = texts()
    parts = [windows(text, some) for some in torch.linspace(0, len(text) - CONTEXT - 1, 512).long().split(64)]
    model.eval()
    return statistics.fmean(float(loss(model(input_ids=part["x"]), part)) for part in parts)


def plain(steps: int, seed: int) -> float:
    """The loop that everybody writes."""
    made = job(seed)
    made.model.train()
    optimizer = made.optimizer(list(made.model.named_parameters()))
    for batch in list(made.batches(0))[:steps]:
        optimizer.zero_grad()
        loss(made.model(input_ids=batch["x"]), batch).backward()
        optimizer.step()
    return held_out(made.model)


def equalised(plan: Plan) -> Plan:
    """The plan with stages that take the same time, and messages and loader that take none."""
    share = 1.0 / (plan.num_stages * plan.micro_batches)
    times = {"forward_s": share, "backward_s": (1 + (plan.rule != "zb-h1")) * share, "weights_s": 0.0, "update_s": 0.0}
    if plan.rule == "zb-h1":
        times["weights_s"] = share
    stages = tuple(replace(stage, **times) for stage in plan.stages)
    return replace(plan, stages=stages, latency_s=0.0, bytes_per_s=1e18, read_s=0.0)


def trained(rule: str, depth: int, micro_batches: int, steps: int, seeds: Sequence[int]) -> Found:
    """Train by a rule, and simulate its plan."""
    losses = []
    plan: Plan | None = None
    for seed in seeds:
        made = job(seed)
        choices: dict[str, Any] = {"workers": depth, "rule": rule, "micro_batches": micro_batches, "threads": 1}
        plan = plan or roundelay.plan(made, cuts="flops", **choices)
        roundelay.train(made, plan=plan, steps=steps, check="off", out=False, progress=False)
        losses.append(held_out(made.model))
    assert plan is not None
    simulated = roundelay.simulate(equalised(plan), batches=32)
    return Found(
        tuple(losses),
        32 / simulated.makespan_s,
        max(report.tape_bytes_peak for report in simulated.workers),
        max(report.versions_held_peak for report in simulated.workers),
    )


def rows_of(depth: int, found: dict[str, Found], exact: Sequence[float]) -> list[list[str]]:
    """The table's rows of one depth."""
    base = found["`1f1b`, the default"]
    rows = [[str(depth), PLAIN, "", f"{statistics.fmean(exact):.3f}", "", "", "1"]]
    for name, one in found.items():
        micro_batches = RULES[name][1](depth)
        tapes = f"{one.tapes / base.tapes:.2g}"
        told = f"{statistics.fmean(one.losses):.3f}", f"{one.rate / base.rate:.2f}", tapes, str(one.versions)
        rows.append(["", name, str(micro_batches), *told])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one depth, one seed, few updates")
    parser.add_argument("--anyway", action="store_true", help="nothing here depends on how busy the machine is")
    parser.add_argument("--out", type=Path, help="write every number there, as JSON")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="numbers of workers")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    asked = parser.parse_args()
    seeds: Sequence[int] = range(1 if asked.short else asked.seeds)
    steps, depths = (10, (2,)) if asked.short else (STEPS, asked.depths)
    exact = [plain(steps, seed) for seed in seeds]
    rows, numbers = [], {}
    for depth in depths:
        found = {}
        for name, (rule, count) in RULES.items():
            found[name] = trained(rule, depth, count(depth), steps, seeds)
            print(f"D = {depth}, {name}: {found[name].losses}", file=sys.stderr, flush=True)
        rows += rows_of(depth, found, exact)
        numbers[depth] = {name: (one.losses, one.rate, one.tapes, one.versions) for name, one in found.items()}
    columns = ["D", "rule", "M", "held-out loss", "rate", "activations", "versions"]
    print(table(columns, rows))
    if asked.out is not None:
        asked.out.write_text(json.dumps({PLAIN: exact, "rules": numbers}))


if __name__ == "__main__":
    main()
