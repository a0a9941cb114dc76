"""How many workers compute on this host's cores where nobody has said it, and what to tell of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roundelay.cores import all_threads, usable_cores
from roundelay.env import is_launched
from roundelay.errors import counted
from roundelay.ir.device_names import CPU
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.planner.given_layout import in_pipeline
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import batch_s
from roundelay.runtime.device import default_devices
from roundelay.schedules import PIPELINE, schedule_named

_NO_FASTER = 0.97
"""Several workers must take less than this share of one worker's time, to be worth their messages and memory."""


def workers_are_open(choices: Choices) -> bool:
    """Whether one worker and two would train the same on this host's CPU, so that the faster may be taken.

    Args:
        choices: with the rule; one that reads older weights means something on several stages only.
    """
    sized = {"workers", "stages", "data_parallel", "tensor_parallel", "signatures", "zero", "hybrid", "memory_limit"}
    sized |= {"cluster"}
    if choices.names() & sized or not in_pipeline(choices) or is_launched():
        return False
    assert choices.rule is not None, "the caller has chosen one"
    flushes = schedule_named(rule_named(choices.rule).schedule).window == "batch"
    on_cpu = (choices.devices or default_devices(choices.transport or "memory")) == CPU
    return flushes and on_cpu and usable_cores() > 1


def choose_faster(one: Plan, several: Plan) -> tuple[Plan, str]:
    """The plan that takes less time for a batch, and why, in words."""
    times = {plan.num_workers: batch_s(plan) for plan in (one, several)}
    taken = several if times[several.num_workers] < _NO_FASTER * times[one.num_workers] else one
    texts = [_timed(plan, times[plan.num_workers]) for plan in (taken, several if taken is one else one)]
    return taken, f"{texts[0]}, by a measurement here; {texts[1]}"


def _timed(plan: Plan, seconds: float) -> str:
    each = " each" if plan.num_workers > 1 else ""
    workers = f"{counted(plan.num_workers, 'worker')} of {counted(plan.threads, 'thread')}{each}"
    return f"{workers}: {seconds * 1e3:.3g} ms a batch"


def most_crossed(plan: Plan) -> int:
    """Most updates between a forward and its backward on stage 0, of a rule that never flushes."""
    in_flight = plan.stages[0].in_flight or plan.num_stages
    return -(-(in_flight - 1) // plan.micro_batches)


def staleness(plan: Plan) -> str:
    """How old the weights are that a rule reads, in words; empty where each batch reads the newest."""
    rule = rule_named(plan.rule)
    if schedule_named(rule.schedule).window == "batch" and rule.versions != "table":
        return ""
    updates = 1 if rule.versions == "table" else most_crossed(plan)
    if not updates or (plan.num_stages == 1 and plan.layout == PIPELINE):
        return ""
    ahead = ", and predicts newer ones from them" if rule.predicts else ""
    return f"rule {plan.rule} reads weights up to {counted(updates, 'update')} old{ahead}"


def cores_notice(plan: Plan, workers: Sequence[int]) -> str:
    """What it costs that some workers share this host with other threads than it has cores for; empty if nothing.

    Args:
        plan: made elsewhere, perhaps.
        workers: numbers of those that run on this host.
    """
    cores, wanted = usable_cores(), all_threads(torch.get_num_threads)
    here = [plan.workers[worker] for worker in workers if plan.workers[worker].device == CPU]
    threads, most = sum(worker.threads for worker in here), max((worker.threads for worker in here), default=0)
    if threads > cores:
        return f"the plan has {threads} threads on {counted(cores, 'core')} here, where they wait for one another"
    if not here or threads + most > wanted:  # all, or a rest that could not be divided
        return ""
    return f"the plan uses {threads} of {wanted} cores here; a new plan, or --threads, uses more"
