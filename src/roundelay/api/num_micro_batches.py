"""Into how many micro-batches a batch is cut, and why not into more, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from roundelay.api.cuts import users_code
from roundelay.api.torch_scope import one_thread
from roundelay.errors import PlanError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.frontend.batch_divisibility import Divisibility, batch_divisibility, counts_add_up
from roundelay.frontend.loss_metrics import no_count
from roundelay.ir.rule import UpdateRule
from roundelay.runtime.forked_call import apart

_LOOKING = "looking at the loss of the first batches and of their parts"


LOOKED_AT = 4
"""First batches that are looked at, at most."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """M, and what a person is told of it, if anything."""

    micro_batches: int
    told: str = ""


def wants_parts(rule: UpdateRule) -> bool:
    """Whether a rule is made for as many micro-batches as stages: two versions, or gradients already summed."""
    return rule.versions == "table" or "partial" in rule.predictors


def choose_parts(
    captured: Captured, rule: UpdateRule, micro_batches: int, first: Callable[[], Sequence[Batch]], *, asked: bool
) -> Chosen:
    """M as asked for; else as usual where the first batch's loss was seen to be the mean of its parts', or 1.

    Args:
        captured: the model.
        rule: the update rule.
        micro_batches: asked for, or usual.
        first: gives the first batches.
        asked: whether it was asked for.

    Raises:
        PlanError: the rule needs several micro-batches of a batch that had better not be cut.
        UserCodeError: the model or its loss fails on the first batch.
    """
    if micro_batches <= 1:
        return Chosen(micro_batches)
    batches = first()
    with users_code(_LOOKING), one_thread():
        seen = Divisibility(**apart(lambda: asdict(batch_divisibility(captured, batches, micro_batches)), _LOOKING))
    if seen.kind == "mean":
        return Chosen(micro_batches)
    if seen.kind == "statistics":
        return Chosen(
            micro_batches,
            f"BatchNorm takes its statistics over each of {micro_batches} micro-batches, as gradient accumulation in "
            "plain PyTorch does; --micro-batches 1 takes them over the whole batch",
        )
    if asked:
        return Chosen(
            micro_batches,
            f"warning: {seen.why}; {micro_batches} micro-batches, as asked for, train the mean of their losses",
        )
    if wants_parts(rule):
        raise PlanError(
            f"rule {rule.name} without a number of micro-batches",
            got=seen.why,
            expected=f"a loss that is the mean of those of {micro_batches} micro-batches: this rule works on several "
            "of every batch",
            remedy=f"Give --rule 1f1b, which trains whole batches, or {_remedy(seen, micro_batches)}.",
        )
    remedy = "" if seen.kind == "whole" else f": {_remedy(seen, micro_batches)}"
    return Chosen(1, f"1 micro-batch for each batch, not {micro_batches}, as {seen.why}{remedy}")


def _remedy(seen: Divisibility, micro_batches: int) -> str:
    if seen.kind == "whole":
        return "batches that can be cut by rows"
    if seen.kind == "counts":
        return f"--micro-batches {micro_batches} cuts it, and counts every part"
    return (
        "a loss that averages over other things than rows may return (sum, count); "
        f"--micro-batches {micro_batches} trains the mean of the parts' losses instead"
    )


def check_counts(captured: Captured, batch: Batch) -> None:
    """Refuse a loss that returns a pair whose second number is not the number of terms of a sum.

    Raises:
        JobError: the parts' counts are not, together, that of the whole first batch.
    """
    if not captured.graph.loss_counts:
        return
    with one_thread():
        found = counts_add_up(captured, batch)
    if found is not None and found[0] != found[1]:
        raise no_count(f"{found[0]:.6g} for the first batch, and {found[1]:.6g} for its two halves together")
