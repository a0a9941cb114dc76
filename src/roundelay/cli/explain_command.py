"""``roundelay explain``: where a plan's time and memory go, and what another plan would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from roundelay.api import capture
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.explained import alternatives, beside, explained
from roundelay.cli.screen import doing, show_json, stdout, table
from roundelay.cli.text_file import write_text
from roundelay.errors import UsageError
from roundelay.finals.search_plan import profiles_of, task_of
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.page.explain_page import explain_page
from roundelay.planner.cluster import Cluster
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.plan_options import Choices
from roundelay.planner.prove_plan import prove
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.job_file import load_job
from roundelay.planning.planning import read_plan
from roundelay.search.account import Account, account
from roundelay.search.search import shown, tried
from roundelay.search.why_not import why_not as find_why_not

_NOTE = """
Predicted, of the first four batches, divided by four. The terms are those of the critical path and add up to the
batch; what lies beside the path costs nothing. Memory is without the optimizer's states, of which a plan does not
tell."""


def explain_command(
    plan_file: Path,
    diff: Path | None,
    job_file: Path | None,
    why_not: str | None,
    html: Path | None,
    search: Path | None,
    *,
    as_json: bool,
) -> None:
    """Explain a plan.

    Args:
        plan_file: the plan.
        diff: another plan to compare it with.
        job_file: whose plan it is.
        why_not: what the plan does not have; the best plan of the job that has it stands beside.
        html: where to write a page of it.
        search: what a search has printed as JSON, for the page.
        as_json: print one JSON object.
    """
    paths = PathResolver()
    others = {} if search is None else {"alternatives": alternatives(search)}
    plans = {plan_file.name: read_plan(plan_file)}
    if diff is not None:
        plans[diff.name if diff.name != plan_file.name else str(diff)] = read_plan(diff)
    elif why_not is not None and job_file is not None:
        plans = dict(_priced_beside(plan_file.name, plans[plan_file.name], job_file, why_not, quiet=as_json))
    for plan in plans.values():
        prove(plan)
    accounts = [account(plan) for plan in plans.values()]
    found, *rest = [explained(plan, one) for plan, one in zip(plans.values(), accounts, strict=True)]
    for name, other in zip([*plans][1:], rest, strict=True):
        found["diff" if why_not is None else "why_not"] = beside(found, name, other)
    found |= others
    if html is not None:
        own = accounts[0]
        write_text(paths.of(html), explain_page(plan_file.name, found, plans[plan_file.name], own.simulation, own.path))
    if as_json:
        show_json(found)
    else:
        _show(plans, accounts)


def _priced_beside(name: str, plan: Plan, job_file: Path, why_not: str, *, quiet: bool) -> Iterator[tuple[str, Plan]]:
    """A plan, and the best that has what it has not, both priced from one look at the job."""
    job = load_job(job_file, 0)
    with doing("Capturing the model ...", quiet) as show_wait:
        captured = capture(job, deadline_s=plan.deadline_s, tell=show_wait)
    if plan.model != captured.graph.fingerprint:
        raise UsageError(
            f"--job {job_file}",
            got="another model than the plan's",
            expected="the job that the plan was made of",
            remedy="Name that job, or make a new plan of this one.",
        )
    with doing("Measuring the model's operations ...", quiet) as show_wait:
        machine = replace(hardware_here(), cluster=Cluster.of(plan))
        most = plan.num_workers if machine.cluster else max(plan.num_workers, machine.devices, min(2, machine.cores))
        given = Choices(workers=most, precision=plan.precision)
        task = task_of(Examined(job, captured, 0, show_wait), given, machine, profiles_of(given, machine))
    with doing("Searching ...", quiet):
        yield name, tried(task, inherited(plan, Choices())).priced.plan
        other = find_why_not(task, plan, why_not)
        yield shown(other.choices), other.priced.plan


def _show(plans: Mapping[str, Plan], accounts: list[Account]) -> None:
    names, first = list(plans), next(iter(plans.values()))
    stdout.print(table(_title(first, accounts[0]), ["per batch", *_heads(names)], _rows(accounts)))
    for (name, plan), one in zip(plans.items(), accounts, strict=True):
        _show_stages(f"stages of {name}", plan, one)
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


def _show_stages(title: str, plan: Plan, own: Account) -> None:
    rows = [
        [
            f"stage {one.stage}",
            ", ".join(map(plan.told, one.workers)),
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
