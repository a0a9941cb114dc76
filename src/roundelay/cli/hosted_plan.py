"""The plan of a hosted run: a draft before anybody joins, then one for the machines that have come."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch

from roundelay.api import capture
from roundelay.cli.host_options import RULE
from roundelay.cli.plan_from_options import PlannedJob, PlanSource, capture_deadline_s, resumed_plan, show_plan
from roundelay.cli.screen import announce, doing
from roundelay.cores import all_threads, usable_cores
from roundelay.errors import CaptureError, PlanError, UsageError
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices, CutRequest
from roundelay.planner.price import Priced, priced
from roundelay.planner.prove_plan import prove
from roundelay.planner.source import Hardware
from roundelay.planning.check_here import check_here
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined
from roundelay.planning.explain_plan import plan_notices
from roundelay.planning.memory_limit import check_memory, first_allowed, within_limit
from roundelay.planning.planning import plan_with_reasons
from roundelay.runtime.loading.prefetch import ignore_wait
from roundelay.schedules import PIPELINE
from roundelay.session.offer import Offer, cluster_of

EACH: Final[dict[str, Any]] = {
    "layout": PIPELINE,
    "data_parallel": 1,
    "tensor_parallel": 1,
    "devices": "cpu",
    "transport": "grpc",
    "compile": False,
}
"""Choices of every hosted run, whatever the run that it continues had."""

_OF_ITS_FORM = ("stages", "zero", "hybrid", "signatures", "cuts", "threads")
"""Choices that are not taken over from the run that is continued: they were made for its form, or for its machines."""

KEPT = 1.05
"""How many times as long a batch may take by the cuts of the run that is continued: then they are kept, and with them
what is in flight. Measuring is not more exact."""


@final
@dataclass(frozen=True, slots=True)
class Draft:
    """A job with a plan for machines like this one, which tells before anybody joins what cannot be.

    Args:
        planned: the job and that plan.
        asked: the choices, beside them those of the run that is continued.
        facts: what the planner must know of the job, measured while this process may fork.
        seed: of the run.
        cuts: of the run that is continued, if it had as many machines.
    """

    planned: PlannedJob
    asked: Choices
    facts: ModelFacts
    seed: int
    cuts: CutRequest | None = None

    def for_machines(self, offers: Sequence[Offer]) -> PlannedJob:
        """The job with the plan for the machines that are here.

        Raises:
            PlanError: none fits.
        """
        cluster = cluster_of(offers, self.asked.threads, self.facts.speedup)
        own = cluster.workers[0].threads or 1
        machine, asked = Hardware(usable_cores(), own, 0, cluster), replace(self.asked, threads=own)
        best = self._priced(asked, machine)
        if self.cuts is not None:
            with suppress(PlanError, CaptureError):
                known = self._priced(replace(asked, cuts=self.cuts), machine)
                check_memory(_examined(self.planned, self.seed), known.plan, None, cluster)
                best = known if known.batch_s <= KEPT * best.batch_s else best
        prove(best.plan)
        show_plan(best.plan)
        notices = (*self.planned.notices, *plan_notices(best.plan))
        return replace(self.planned, plan=best.plan, notices=notices)

    def _priced(self, asked: Choices, machine: Hardware) -> Priced:
        facts, source = self.facts.measured_with(machine.threads), _examined(self.planned, self.seed)

        def made() -> Iterator[tuple[Hashable, Callable[[], Priced]]]:
            for choices in within_limit(asked):
                found = priced(facts, choices, machine)
                yield tuple([stage.segments for stage in found.plan.stages]), partial(allowed, found)

        def allowed(found: Priced) -> Priced:
            check_memory(source, found.plan, asked.memory_limit)
            return found

        return first_allowed(made())


def drafted(job: Job, choices: Choices, peers: int, seed: int, resume: Path | None, *, quiet: bool) -> Draft:
    """Plan a run of so many machines.

    Args:
        job: the job.
        choices: of the command line.
        peers: machines, this one included.
        seed: of the run.
        resume: the checkpoint or the run that is continued.
        quiet: print errors only.

    Raises:
        UsageError: the model has not so many stages.
    """
    if resume is None:
        check_here(continued(replace(choices, workers=peers), None)[0])
    deadline_s = capture_deadline_s(choices, PlanSource(resume=resume), leads=True)
    with doing("Capturing the model ...", quiet) as show_wait:
        captured = capture(job, seed=seed, deadline_s=deadline_s, tell=show_wait)
    before = None if resume is None else resumed_plan(resume, captured.graph.fingerprint)
    asked, cuts = continued(replace(choices, workers=peers), before)
    with doing("Planning and measuring the stages ...", quiet) as show_wait:
        planned = plan_with_reasons(job, asked, captured=captured, seed=seed, tell=show_wait)
    if planned.plan.num_workers != peers:
        raise UsageError(
            "--peers",
            got=str(peers),
            expected=f"{planned.plan.num_workers}: the model cannot be cut into more stages",
            remedy="Invite fewer machines, or bring a larger model.",
        )
    for line in planned.notices:
        announce(f"{line}.", quiet and line not in planned.warnings)
    draft = PlannedJob(job, captured, planned.plan, planned.reasons, planned.notices)
    threads = sorted({1, asked.threads or 1, all_threads(torch.get_num_threads)})
    facts = collect_facts(_examined(draft, seed), precision=planned.plan.precision, threads=threads)
    return Draft(draft, asked, facts, seed, None if asked.cuts is not None else cuts)


def continued(choices: Choices, before: Plan | None) -> tuple[Choices, CutRequest | None]:
    """The choices of a hosted run, and the cuts of the run that it continues if this had as many machines.

    It keeps the choices of that run, but for those of its form: a batch is cut into as many micro-batches in all, and
    each machine has one worker.

    Args:
        choices: of the command line, with the number of workers.
        before: the plan of the run that is continued.
    """
    each = choices.over(Choices(**EACH))
    if before is None:
        return each.over(Choices(rule=RULE)), None
    kept = inherited(before, replace(choices, layout=PIPELINE, transport=EACH["transport"]))
    cuts = kept.cuts
    if choices.rule in (None, before.rule):
        kept = replace(kept, micro_batches=before.batch_parts)
    return each.over(replace(kept, **dict.fromkeys(_OF_ITS_FORM))), cuts


def _examined(planned: PlannedJob, seed: int) -> Examined:
    return Examined(planned.job, planned.captured, seed, ignore_wait)
