"""What the benchmarks of papers share: a case, the lines it compares, and a table with the paper's column beside ours.

A case is one task with one optimizer; a line is one rule with its number of micro-batches, M. All are trained by
`roundelay compare`'s own function, seed by seed, and kept in a folder, so that a benchmark goes on where it was
stopped. Accuracies do not depend on how busy the machine is; nothing here is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import roundelay
from benchmarks import common
from roundelay.comparison.comparison import Compared, RunStarted
from roundelay.comparison.comparison_charts import write_comparison
from roundelay.comparison.comparison_table import Aims, reported_curve
from roundelay.comparison.run_results import RunResult
from roundelay.errors import RoundelayError, UsageError
from roundelay.job import OptimizerFactory

D = 4
"""Stages; both papers have four."""

Make = Callable[[int], roundelay.Job]


@dataclass(frozen=True, slots=True)
class Line:
    """A rule as the paper calls it, as Roundelay does, and its micro-batches per batch."""

    title: str
    rule: str
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One task with one optimizer.

    Args:
        title: what stands in the table.
        make: seed to job.
        lines: what is compared on it.
        epochs: of every run.
        metric: the metric of the job's ``evaluate`` that the table tells.
        scale: 100 where the metric is a share and the table tells per cent.
        target: value of the metric whose first time is told, or None.
        cuts: as for ``roundelay compare``.
        paper: title of a line to what the paper found in the case that this one stands for.
    """

    title: str
    make: Make
    lines: Sequence[Line]
    epochs: int
    metric: str = "accuracy"
    scale: float = 100.0
    target: float | None = None
    cuts: str = "equal"
    paper: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """What a case's lines came to.

    Args:
        case: the case.
        outcomes: title of a line to its runs, by seed; none of a rule that was refused.
    """

    case: Case
    outcomes: Mapping[str, Sequence[RunResult]]

    def values(self, title: str, pick: Callable[[RunResult, str], float]) -> list[float]:
        """A number of every run of a line that did not diverge."""
        return [pick(o, self.case.metric) for o in self.outcomes.get(title, ()) if o.diverged is None]

    def mean(self, title: str, pick: Callable[[RunResult, str], float]) -> float:
        """Over its seeds, in the table's unit; nan without any."""
        values = self.values(title, pick)
        return self.case.scale * statistics.fmean(values) if values else math.nan

    def gap(self, below: str, above: str, pick: Callable[[RunResult, str], float]) -> str:
        """How far one line is above another: mean and standard error over the seeds that both have finished."""
        low, high = (
            {o.seed: self.case.scale * pick(o, self.case.metric) for o in self.outcomes[title] if o.diverged is None}
            for title in (below, above)
        )
        gaps = [high[seed] - low[seed] for seed in low.keys() & high.keys()]
        if len(gaps) < 2:
            return f"{gaps[0]:+.1f}" if gaps else "–"
        return f"{statistics.fmean(gaps):+.1f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.1f}"

    def text(self, title: str, pick: Callable[[RunResult, str], float]) -> str:
        """Mean ± standard deviation over seeds."""
        values = [self.case.scale * value for value in self.values(title, pick)]
        runs = len(self.outcomes.get(title, ()))
        lost = f" ({runs - len(values)} of {runs} diverged)" if len(values) < runs else ""
        if not values:
            return "diverged" if runs else "–"
        if len(values) == 1:
            return f"{values[0]:.1f}{lost}"
        return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}{lost}"


def last(outcome: RunResult, name: str) -> float:
    """A metric at the end of a run."""
    return reported_curve(outcome, name)[-1].value


def best(outcome: RunResult, name: str) -> float:
    """The highest value of a metric in a run."""
    return max(point.value for point in reported_curve(outcome, name))


def average(outcome: RunResult, name: str) -> float:
    """A metric's mean over the evaluations of a run, which tells how soon it learns beside how far."""
    return statistics.fmean(point.value for point in reported_curve(outcome, name))


def updates_to(outcome: RunResult, name: str, target: float) -> float:
    """Updates until a metric is at least the target; infinite if it never is."""
    return next((float(p.updates) for p in reported_curve(outcome, name) if p.value >= target), math.inf)


def run(case: Case, seeds: int, folder: Path) -> Found:
    """Train every line, but for what the folder has; also write tables and curves there, one set for each M."""
    outcomes: dict[str, Sequence[RunResult]] = {}
    for micro_batches in dict.fromkeys(line.micro_batches for line in case.lines):
        lines = [line for line in case.lines if line.micro_batches == micro_batches]
        place = folder / slug(case.title) / f"M{micro_batches}"
        compared = compare(case, [line.rule for line in lines], micro_batches, seeds, place)
        write_comparison(compared, place, Aims({}, {case.metric: "high"}))
        by_rule = {variant.rule_text: variant for variant in compared.variants}
        outcomes |= {line.title: compared.of(by_rule[line.rule]) for line in lines}
    return Found(case, outcomes)


def compare(case: Case, rules: Sequence[str], micro_batches: int, seeds: int, place: Path) -> Compared:
    """The lines of a case that have one M."""

    def tell(event: object) -> None:
        if isinstance(event, RunStarted):
            run_of = f"run {event.number} of {event.total}, {event.finished_before} found"
            print(f"{case.title}: {event.variant.rule_text} M={micro_batches}, {run_of}", file=sys.stderr, flush=True)

    return roundelay.compare(
        case.make,
        out=place,
        rules=rules,
        seeds=seeds,
        workers=D,
        cuts=case.cuts,
        epochs=case.epochs,
        micro_batches=micro_batches,
        transport="memory",
        source=digest(case.make),
        notify=tell,
    )


def digest(make: Make) -> str:
    """Of the file that defines the job, and of what its maker was given: a folder of another recipe is refused."""
    maker, given = (make.func, [repr_of(v) for v in make.keywords.items()]) if isinstance(make, partial) else (make, [])
    text = Path(maker.__code__.co_filename).read_bytes()
    return hashlib.sha256(text + repr(given).encode()).hexdigest()[:16]


def repr_of(item: tuple[str, Any]) -> str:
    """A keyword, without the address that a function's own repr has: it would be another one in every process."""
    name, value = item
    if isinstance(value, partial):
        return f"{name}={value.func.__name__}{sorted(value.keywords.items())}"
    return f"{name}={value.__module__}.{value.__qualname__}" if callable(value) else repr(item)


def slug(title: str) -> str:
    """A title as a folder's name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in title).strip("-")


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> OptimizerFactory:
    """What makes an optimizer from named parameters."""
    return partial(_made, kind=kind, **settings)


def _made(named: Any, *, kind: Any, **settings: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(named, **settings)
    return made


def beside(found: Iterable[Found], titles: Sequence[str], pick: Callable[[RunResult, str], float]) -> str:
    """A row for every case: of each line ours, and the paper's in brackets."""
    rows = []
    for one in found:
        cells = [
            one.text(title, pick) + (f" [{one.case.paper[title]}]" if title in one.case.paper else "")
            for title in titles
        ]
        rows.append([one.case.title, *cells])
    return common.table(["case", *titles], rows)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for: names of parts, seeds, the folder of runs, and whether the short form.

    Of the cases and rules all, if none are named: of cases, parts of their titles; of rules, with predictor and mode.
    """

    parts: Sequence[str]
    seeds: int
    out: Path
    short: bool
    cases: Sequence[str] = ()
    rules: Sequence[str] = ()

    def run(self, cases: Sequence[Case]) -> list[Found]:
        """Run the cases; in the short form the first one only, for an epoch, so without the paper's figures."""
        if self.short:
            cases = [replace(case, epochs=1, paper={}) for case in cases[:1]]
        return [run(case, self.seeds, self.out) for case in self.wanted(cases)]

    def wanted(self, cases: Sequence[Case]) -> list[Case]:
        """The cases, with the lines, that were asked for.

        Raises:
            UsageError: something named is of none.
        """
        titles, rules = [case.title for case in cases], {line.rule for case in cases for line in case.lines}
        strange = [part for part in self.cases if not any(part in title for title in titles)]
        if strange := [*strange, *(rule for rule in self.rules if rule not in rules)]:
            raise UsageError(
                "--case and --rule",
                got=", ".join(strange),
                expected=f"parts of {', '.join(map(repr, titles))}, and rules among {', '.join(sorted(rules))}",
                remedy="Name some of these, or leave both options out to run all.",
            )
        named = [case for case in cases if not self.cases or any(part in case.title for part in self.cases)]
        return [replace(case, lines=lines) for case in named if (lines := self._lines(case))]

    def _lines(self, case: Case) -> list[Line]:
        return [line for line in case.lines if not self.rules or line.rule in self.rules]


def asked(
    description: str, parts: Sequence[str], short_parts: Sequence[str], out: str, narrowed: Sequence[str] = ()
) -> Asked:
    """Parse the command line; of the ``narrowed`` parts it may ask for some cases and rules only."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--table", "--figure", dest="parts", action="append", choices=parts, help="default: all")
    parser.add_argument("--seeds", type=int, help="default: 5, in the short form 1")
    several = {"action": "append", "default": []}
    if narrowed:
        parser.add_argument("--case", dest="cases", **several, help=f"of {', '.join(narrowed)}: part of a title")
        parser.add_argument("--rule", dest="rules", **several, help="of the same: RULE[:PREDICTOR][:MODE]")
    else:
        parser.set_defaults(cases=[], rules=[])
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder of the runs; default: {out}")
    parser.add_argument("--short", action="store_true", help="the form that `make bench` runs: shows that it works")
    parser.add_argument("--anyway", action="store_true", help="taken for the sake of `make bench`: nothing is timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.parts or (short_parts if args.short else parts)
    if (args.cases or args.rules) and (whole := [name for name in chosen if name not in narrowed]):
        parser.error(f"--case and --rule are for {', '.join(narrowed)}, not for {', '.join(whole)}")
    out_folder = args.out / "short" if args.short else args.out
    seeds = args.seeds or (1 if args.short else 5)
    return Asked(chosen, seeds, out_folder, args.short, args.cases, args.rules)


def tell(parts: Mapping[str, Callable[[Asked], str]], what: Asked) -> None:
    """Print each part as it is done; an error of the person's is one paragraph."""
    for name in what.parts:
        try:
            text = parts[name](what)
        except RoundelayError as error:
            sys.exit(str(error))
        print(f"\n## {name}\n\n{text}\n", flush=True)
    print(common.machine())
