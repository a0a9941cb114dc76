"""``roundelay explain``: where a plan's time and memory go, and what another plan would change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roundelay.cli.screen import show_json, stdout, table
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.planner.prove_plan import prove
from roundelay.planning.planning import read_plan
from roundelay.search.account import Account, account

_NOTE = """
Predicted, of the steady state's batches. The terms are those of the critical path and add up to the batch; what lies
beside the path costs nothing. Memory is without the optimizer's states, of which a plan does not tell."""


def explain_command(plan_file: Path, diff: Path | None, *, as_json: bool) -> None:
    """Explain a plan.

    Args:
        plan_file: the plan.
        diff: another plan to compare it with.
        as_json: print one JSON object.
    """
    files = [plan_file, *([diff] if diff is not None else [])]
    plans = [read_plan(file) for file in files]
    for plan in plans:
        prove(plan)
    accounts = [account(plan) for plan in plans]
    if as_json:
        found = [_json(plan, one) for plan, one in zip(plans, accounts, strict=True)]
        show_json(found[0] | ({"diff": found[1]} if diff is not None else {}))
        return
    names = [file.name for file in files]
    stdout.print(table(_title(plans[0], accounts[0]), ["per batch", *_heads(names)], _rows(accounts)))
    for name, plan, one in zip(names, plans, accounts, strict=True):
        _show_stages(f"stages of {name}", one)
        _show_memory(f"memory of {name}", plan, one)
    stdout.print(_NOTE)


def _title(plan: Plan, own: Account) -> str:
    return f"{plan.rule}, {plan.arrangement}, M = {plan.micro_batches}: {own.batch_s * 1e3:.4g} ms a batch"


def _heads(names: list[str]) -> list[str]:
    return ["ms", "share"] if len(names) == 1 else [f"{names[0]} ms", f"{names[1]} ms", "more"]


def _rows(accounts: list[Account]) -> list[list[str]]:
    own = accounts[0]
    names = dict.fromkeys([name for one in accounts for name in one.terms])
    if len(accounts) == 1:
        rows = [[name, f"{own.terms[name] * 1e3:.4g}", f"{own.terms[name] / own.batch_s:.0%}"] for name in names]
        return [*rows, ["a batch", f"{own.batch_s * 1e3:.4g}", "100%"]]
    other = accounts[1]
    pairs = [(name, own.terms.get(name, 0.0), other.terms.get(name, 0.0)) for name in names]
    pairs.append(("a batch", own.batch_s, other.batch_s))
    return [[name, f"{a * 1e3:.4g}", f"{b * 1e3:.4g}", f"{(b - a) * 1e3:+.4g}"] for name, a, b in pairs]


def _show_stages(title: str, own: Account) -> None:
    rows = [
        [
            f"stage {one.stage}",
            ", ".join(f"{worker}" for worker in one.workers),
            f"{one.computes_s * 1e3:.4g}",
            f"{one.on_path_s * 1e3:.4g}",
            ", ".join(f"{own.busy[worker]:.0%}" for worker in one.workers),
        ]
        for one in own.stages
    ]
    columns = ["", "workers", "computes, ms a batch", "of it on the path", "workers are busy"]
    stdout.print()
    stdout.print(table(title, columns, rows))


def _show_memory(title: str, plan: Plan, own: Account) -> None:
    items = [name for name in own.memory[0].items() if name != "optimizer"]
    rows = [
        [plan.workers[k].name, *(bytes_text(one.items()[name]) for name in items), bytes_text(one.total)]
        for k, one in enumerate(own.memory)
    ]
    stdout.print()
    stdout.print(table(title, ["", *items, "total"], rows))


def _json(plan: Plan, own: Account) -> dict[str, Any]:
    return {
        "rule": plan.rule,
        "arrangement": plan.arrangement,
        "batch_s": own.batch_s,
        "terms": dict(own.terms),
        "stages": [
            {"stage": s.stage, "workers": list(s.workers), "computes_s": s.computes_s, "on_path_s": s.on_path_s}
            for s in own.stages
        ],
        "busy": list(own.busy),
        "memory": [{k: v for k, v in one.items().items() if k != "optimizer"} for one in own.memory],
    }
