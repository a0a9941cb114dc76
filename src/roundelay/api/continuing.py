"""Whether a run can go on in mid-flight from a checkpoint, and why not."""

from __future__ import annotations

from collections.abc import Mapping

from roundelay.ir.plan import Plan
from roundelay.lower.check import programs_of
from roundelay.observe.flight import Flight


def order_of(plan: Plan) -> dict[str, str]:
    """What the order of work and the versions read depend on, by what a person calls it.

    Where stages run, how they talk and how many slots they have is no part of it: a run goes on over another transport.
    """
    blocks = [
        (program.window, program.lag, *map(str, (*program.warm_up, *program.steady, *program.drain)))
        for program in programs_of(plan)
    ]
    return {
        "workers": str(plan.num_stages),
        "micro-batches": str(plan.micro_batches),
        "rule": plan.rule,
        "predictor": plan.predictor,
        "backward": plan.backward,
        "cuts": " ".join(",".join(stage.segments) for stage in plan.stages),
        "programs": "; ".join(" ".join(map(str, block)) for block in blocks),
    }


def changed(flight: Flight, order: Mapping[str, str]) -> str:
    """What of the order is another than the checkpoint's, for people; empty if nothing is."""
    was = {name: flight.order.get(name, "nothing") for name in order}
    odd = [name for name in order if was[name] != order[name]]
    if not odd:
        return ""
    told = [name for name in odd if name not in ("cuts", "programs")]
    if told:
        return "the plan changed: " + ", ".join(f"{name} from {was[name]} to {order[name]}" for name in told)
    return "the plan changed: " + ("other cuts" if "cuts" in odd else "what the rule's programs say")
