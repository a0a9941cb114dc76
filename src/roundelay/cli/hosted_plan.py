"""The plan of a hosted run: a draft before anybody joins, then one for the machines that have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch

from roundelay.cli.host_options import RULE
from roundelay.cli.plan_from_options import PlannedJob, PlanSource, plan_files, plan_job, plan_of
from roundelay.cores import all_threads, usable_cores
from roundelay.errors import UsageError
from roundelay.job import Job
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import priced
from roundelay.planner.prove_plan import prove
from roundelay.planner.source import Hardware
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined
from roundelay.planning.memory_limit import check_memory
from roundelay.runtime.loading.prefetch import ignore_wait
from roundelay.schedules import PIPELINE
from roundelay.session.offer import Offer, cluster_of

EACH: Final[dict[str, Any]] = {
    "layout": PIPELINE,
    "data_parallel": 1,
    "tensor_parallel": 1,
    "devices": "cpu",
    "transport": "grpc",
}
"""Choices of every hosted run, whatever the run that it continues had."""


@final
@dataclass(frozen=True, slots=True)
class Draft:
    """A job with a plan for machines like this one, which tells before anybody joins what cannot be.

    Args:
        planned: the job and that plan.
        asked: the choices, beside them those of the run that is continued.
        facts: what the planner must know of the job, measured while this process may fork.
        seed: of the run.
    """

    planned: PlannedJob
    asked: Choices
    facts: ModelFacts
    seed: int

    def for_machines(self, offers: Sequence[Offer]) -> PlannedJob:
        """The job with the plan for the machines that are here.

        Raises:
            PlanError: none fits.
        """
        cluster = cluster_of(offers, self.asked.threads, self.facts.speedup)
        own = cluster.workers[0].threads or 1
        facts = self.facts.measured_with(own)
        plan = priced(facts, replace(self.asked, threads=own), Hardware(usable_cores(), own, 0, cluster)).plan
        prove(plan)
        check_memory(_examined(self.planned, self.seed), plan, self.asked.memory_limit)
        return replace(self.planned, plan=plan)


def drafted(job: Job, choices: Choices, peers: int, seed: int, source: PlanSource, *, quiet: bool) -> Draft:
    """Plan a run of so many machines.

    A run that is continued keeps its choices, but for the cuts and the threads: those are of the machines it had.

    Raises:
        UsageError: the model has not so many stages.
    """
    continues = source.resume is not None and bool(plan_files(source.resume))
    rule = choices.rule or (None if continues else RULE)
    asked = replace(choices, rule=rule).over(Choices(workers=peers, **EACH))
    planned = plan_job(job, asked, seed, source, quiet=quiet)
    if planned.plan.num_workers != peers:
        raise UsageError(
            "--peers",
            got=str(peers),
            expected=f"{planned.plan.num_workers}: the model cannot be cut into more stages",
            remedy="Invite fewer machines, or bring a larger model.",
        )
    resumed = None if source.resume is None else plan_of(source.resume, planned.plan.model)
    if resumed is not None:
        asked = asked.over(replace(inherited(resumed, asked), cuts=None, threads=None))
    threads = sorted({1, all_threads(torch.get_num_threads)})
    facts = collect_facts(_examined(planned, seed), precision=planned.plan.precision, threads=threads)
    return Draft(planned, asked, facts, seed)


def _examined(planned: PlannedJob, seed: int) -> Examined:
    return Examined(planned.job, planned.captured, seed, ignore_wait)
