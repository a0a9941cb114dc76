"""Judges a command line before torch is loaded and the job file is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from roundelay.cli.options import RunOptions, exclusive
from roundelay.cli.registered_rules import may_register_rules
from roundelay.comparison.comparison_variants import parse_numbers, rule_of_cuts, variants
from roundelay.errors import UsageError
from roundelay.ir.rule import rule_named, rules
from roundelay.planner.check_given import check_each, check_given, check_length, validate_check
from roundelay.planner.plan_options import Choices

OF_SIGNATURES = {"cluster", "micro_batches", "precision", "memory_limit", "deadline_s"}
"""Choices that count in a search over signatures."""


def check_choices(job_file: Path, choices: Choices, *, planned: bool = False) -> None:
    """Check the choices for a plan.

    Args:
        job_file: may register rules.
        choices: of the command line.
        planned: whether there is a plan, or a run that is continued, with which they must agree.

    Raises:
        PlanError: a choice cannot be used, whatever the job is.
    """
    known = choices.rule is None or _is_known(job_file, choices.rule)
    if planned:
        check_each(choices)
    else:
        check_given(choices, rule_known=known)


def check_search(job_file: Path, choices: Choices, show: str | None) -> None:
    """Check the options of a search.

    Raises:
        UsageError: one of them cannot be used.
    """
    if show is not None:
        raise UsageError(
            "--search with --show", got=show, expected="one of them", remedy="Write the plan, then show it."
        )
    check_choices(job_file, choices, planned=True)  # each by itself: what else is needed is searched


def allowed_rules(job_file: Path, allow: str | None, *, search: bool) -> dict[str, float]:
    """Rules that a search may choose beside the given one, and how many times as many batches each needs.

    Raises:
        UsageError: it is no list of rules with factors, or nothing is searched.
        PlanError: there is no such rule, and the job registers none.
    """
    if allow is not None and not search:
        raise UsageError("--allow", got="no --search for a plan", expected="--search", remedy="Give --search.")
    found = {}
    for entry in [] if allow is None else allow.split(","):
        name, _, text = (part.strip() for part in entry.partition("="))
        _is_known(job_file, name)
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            raise UsageError(
                "--allow",
                got=repr(entry),
                expected="rules, each with how many times as many batches it needs, such as pipedream-2bw=1.1",
                remedy="Measure it with roundelay compare: a rule without a factor would win by assumption.",
            )
    return found


def check_space(space: str | None, choices: Choices, output: Path | None, *, search: bool, finals: bool) -> None:
    """Check what a search is asked to look through.

    Raises:
        UsageError: one of the options needs another, or replaces it.
    """
    if space not in (None, "runnable", "all"):
        raise UsageError("--space", got=repr(space), expected="runnable or all", remedy="Choose one of these.")
    if space is not None and not search:
        raise UsageError("--space", got="no --search", expected="--search", remedy="Give --search.")
    if space == "all" and choices.cluster is None:
        raise UsageError(
            "--space all",
            got="no --cluster",
            expected="both: the axes of the mesh, and the links along them, stand in the file",
            remedy="Give --cluster.",
        )
    if choices.cluster is not None and finals:
        raise UsageError(
            "--finals with --cluster",
            got="both",
            expected="one of them: the workers of a cluster are not here to be run on",
            remedy="Leave --finals out: predictions decide.",
        )
    if space == "all" and (others := sorted(choices.names() - OF_SIGNATURES)):
        raise UsageError(
            f"--{others[0].replace('_', '-')} with --space all",
            got="both",
            expected="--cluster, --micro-batches, --precision, --memory-limit and --deadline-s alone",
            remedy="Leave it out: signatures of every operation are searched, not plans that run.",
        )
    if space == "all" and (finals or output is not None):
        raise UsageError(
            "--finals, --output with --space all",
            got="one of them",
            expected="none: what is found is priced, and no plan yet",
            remedy="Leave them out.",
        )


def check_explained(
    diff: Path | None, job_file: Path | None, why_not: str | None, html: Path | None, search: Path | None
) -> None:
    """Check the options of ``explain``.

    Raises:
        UsageError: one of them needs another, or replaces it.
    """
    if diff is not None and why_not is not None:
        raise UsageError("--diff with --why-not", got="both", expected="one of them", remedy="Leave one of them out.")
    if (job_file is None) != (why_not is None):
        got, other = ("--job", "--why-not") if why_not is None else ("--why-not", "--job")
        raise UsageError(got, got="it alone", expected=f"{other} with it", remedy=f"Give {other}, or leave {got} out.")
    if search is not None and html is None:
        raise UsageError("--search", got="no --html", expected="--html", remedy="Give --html, or leave --search out.")


def check_run(run: RunOptions) -> None:
    """Check the options of a run.

    Raises:
        UsageError: one of them cannot be used.
    """
    check_lengths(run.steps, run.epochs)
    validate_check(run.check)


def check_lengths(steps: int | None, epochs: int | None) -> None:
    """Check ``--steps`` and ``--epochs``.

    Raises:
        UsageError: both are given, or one is not positive.
    """
    exclusive(steps, epochs)
    check_length(steps, epochs)


def check_comparison(
    job_file: Path, choices: Choices, rules: Sequence[str], optimizers: Sequence[str], rates: Sequence[str]
) -> None:
    """Check the choices of a comparison.

    Args:
        job_file: may register rules.
        choices: for the plans of all rules.
        rules: as given, each with a predictor and a mode.
        optimizers: as given.
        rates: learning rates, as given.

    Raises:
        UsageError: one of them cannot be used, whatever the job is.
    """
    names = [text.split(":")[0].strip() for text in rules]
    if all(_is_known(job_file, name) for name in names if name != "all"):
        variants(rules, optimizers, parse_numbers(rates, "--lr"))
    check_given(replace(choices, rule=rule_of_cuts(choices.layout)))


def _is_known(job_file: Path, name: str) -> bool:
    """Whether there is such a rule; False if the job may register it.

    Raises:
        PlanError: there is none, and the job registers none.
    """
    known = name in [one.name for one in rules()]
    if not known and not may_register_rules(job_file):
        rule_named(name)
    return known
