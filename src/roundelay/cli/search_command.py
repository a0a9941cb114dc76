"""``roundelay plan --search``: search for a plan, run the best, and write the one that is fastest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundelay.api import capture
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.screen import announce, show_json, stderr, table
from roundelay.cli.text_file import write_text
from roundelay.errors import counted
from roundelay.finals.search_plan import Final, Searched, SearchPlan
from roundelay.planner.plan_options import DEADLINE_S, Choices
from roundelay.planner.prove_plan import prove
from roundelay.planning.explain_plan import explain
from roundelay.planning.job_file import load_job
from roundelay.schedules import PIPELINE
from roundelay.search.search import Tried, shown

SHOWN = 5
"""Of the best that are told of."""


def search_command(
    job_file: Path,
    choices: Choices,
    seed: int,
    output: Path | None,
    *,
    finals: int | None,
    allowed: Mapping[str, float],
    as_json: bool,
) -> None:
    """Search for a plan, and write it; ended early, write the best so far.

    Args:
        job_file: defines the job.
        choices: what the plan must have; `workers` is how many there are in all.
        seed: of the data.
        output: where to write it; None: to stdout.
        finals: how many of the best are run; None: :data:`~roundelay.finals.search_plan.FINALS`.
        allowed: rules that may be chosen beside the given one, and how many times as many batches each needs.
        as_json: print one JSON object.
    """
    paths = PathResolver()
    job = load_job(job_file, seed)
    output = paths.of(output)
    with stderr.status("Capturing the model ...") as status:
        tell = (lambda words: None) if as_json else status.update if stderr.is_terminal else _Log()
        captured = capture(job, seed=seed, deadline_s=choices.deadline_s or DEADLINE_S)
        searching = SearchPlan(job, captured, choices, seed, tell, allowed=allowed)
        try:
            searched = searching.run(finals)
        except KeyboardInterrupt:
            _write_best(searching.best, output)
            raise
    planned = searched.planned
    text = planned.plan.text(explain(captured, planned.plan, (*_reasons(searched), *planned.reasons)))
    if output is not None:
        write_text(output, text)
    if as_json:
        show_json(_json(searched, text))
        return
    _show(searched)
    for notice in planned.notices:
        announce(f"{notice}.", quiet=False)
    if output is None:
        sys.stdout.write(text)
    else:
        stderr.print(f"Wrote {output}. Run it: roundelay train {job_file} --plan {output}")


class _Log:
    """Tells a log what is done now: a line for each thing, not for how far it is."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, words: str) -> None:
        thing = words.removesuffix(" ...").partition(":")[0].partition(",")[0]
        if thing not in self._told:
            self._told.add(thing)
            stderr.print(words, markup=False)


def _write_best(best: Tried | None, output: Path | None) -> None:
    """Write the best plan of a search that was ended early."""
    if best is None:
        return
    prove(best.priced.plan)
    text = best.priced.plan.text(["The best plan of a search that was ended early; its seconds are predicted."])
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text)
    stderr.print(f"Wrote {output}: the best plan so far, {shown(best.choices)}.", markup=False)


def _reasons(searched: Searched) -> list[str]:
    found = searched.found
    count = sum(final.measured_s is not None for final in searched.finals)
    how = f"the fastest of {count} that were run" if count else "by prediction"
    return [f"search: {shown(searched.chosen.choices)}, {how}; {found.simulated} of {found.points} plans simulated"]


def _show(searched: Searched) -> None:
    found = searched.found
    rows = [_row(final.name, final.tried, final) for final in searched.finals]
    rows = rows or [_row(f"best {i + 1}", one, None) for i, one in enumerate(found.best[:SHOWN])]
    others = "; all others are slower by their computation alone" if found.points > found.simulated else ""
    title = f"{found.points} plans, {found.simulated} simulated{others}; cut elsewhere at most {found.gap:.0%} faster"
    stderr.print(table(title, ["found as", "predicted ms", "measured ms", "plan"], rows))
    for final in searched.finals:
        if final.why:
            stderr.print(f"{final.name} failed: {final.why}", markup=False)


def _row(name: str, one: Tried, final: Final | None) -> list[str]:
    measured = "" if final is None else "failed" if final.measured_s is None else f"{final.measured_s * 1e3:.4g}"
    return [name, f"{one.batch_s * 1e3:.4g}", measured, _in_short(one)]


def _in_short(one: Tried) -> str:
    """A plan in a few words."""
    plan = one.priced.plan
    words = [plan.arrangement, plan.rule, f"M {plan.micro_batches}"]
    words += [plan.layout] * (plan.layout != PIPELINE) + ["recomputed"] * bool(plan.recompute)
    words += [f"{one.batches:g} x as many batches"] * (one.batches != 1.0)
    words += [plan.transport] * (plan.num_workers > 1) + [counted(plan.threads, "thread")] * (plan.num_workers == 1)
    return ", ".join(words)


def _json(searched: Searched, text: str) -> Mapping[str, Any]:
    found = searched.found
    return {
        "plan": text,
        "space": {"plans": found.points, "simulated": found.simulated, "refused": dict(found.refused)},
        "gap": found.gap,
        "notices": list(searched.planned.notices),
        "seconds": dict(searched.seconds),
        "chosen": _tried_json(searched.chosen),
        "top": [_tried_json(one) for one in found.best],
        "baselines": {name: one and _tried_json(one) for name, one in searched.baselines.items()},
        "finals": [
            {"name": final.name, "measured_s": final.measured_s, "why": final.why, **_tried_json(final.tried)}
            for final in searched.finals
        ],
    }


def _tried_json(one: Tried) -> dict[str, Any]:
    choices = {name: v if isinstance(v, int | float | str) else str(v) for name, v in one.choices.given().items()}
    return {"choices": choices, "predicted_s": one.batch_s, "batches": one.batches, "memory_bytes": one.memory}
