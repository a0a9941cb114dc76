"""Choose into how many micro-batches a batch is cut, with the reason in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roundelay.errors import PlanError
from roundelay.ir.rule import UpdateRule
from roundelay.planner.draft_plan import needs_micro_batches
from roundelay.planner.source import Divisibility


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """M, and what to say of it.

    Args:
        micro_batches: M.
        notice: for the user, if any.
        otherwise: whether it says that this M trains something else than whole batches.
    """

    micro_batches: int
    notice: str = ""
    otherwise: bool = False


def choose_micro_batches(
    rule: UpdateRule,
    micro_batches: int,
    divisible: Callable[[int], Divisibility],
    *,
    requested: bool,
    replicas: int = 1,
    dealt: bool = False,
) -> MicroBatchChoice:
    """Return M as requested; else the default if the first batches' losses are the means of their parts', or 1.

    Args:
        rule: the update rule.
        micro_batches: as requested, or the default; of each replica.
        divisible: from a number of parts to whether the first batches may be cut into so many.
        requested: whether it was requested.
        replicas: R, among which a batch is dealt out.
        dealt: whether these are what a layout has by default.

    Raises:
        PlanError: the rule needs several micro-batches, or there are several replicas, and the batch cannot be cut.
        UserCodeError: the model or its loss fails on the first batch.
    """
    parts = micro_batches * replicas
    if parts <= 1:
        return MicroBatchChoice(micro_batches)
    divisibility = divisible(parts)
    if divisibility.kind == "mean":
        return MicroBatchChoice(micro_batches)
    run = divisibility.run
    whole_batches = not requested and not dealt and not needs_micro_batches(rule)
    if divisibility.kind == "statistics":
        return _of_statistics(rule, micro_batches, replicas, run, whole=whole_batches and micro_batches > 1)
    if divisibility.kind == "whole" and replicas > 1:
        raise PlanError(
            f"{replicas} replicas (--data-parallel, --hybrid)",
            got=divisibility.why,
            expected="batches that can be dealt out to the replicas by rows",
            remedy="Give larger batches whose tensors have the batch dimension first, or leave replicas out.",
        )
    if requested and run == 1:
        return MicroBatchChoice(micro_batches, f"{divisibility.why}: each such batch is trained whole")
    if requested:
        return MicroBatchChoice(
            micro_batches,
            f"warning: {divisibility.why}; {run} micro-batches, as asked for, train the mean of their losses",
            otherwise=True,
        )
    if needs_micro_batches(rule) or (dealt and replicas > 1):
        raise _not_the_mean(rule, divisibility, parts, (parts if dealt else micro_batches), dealt=dealt)
    if replicas > 1:
        return MicroBatchChoice(
            1,
            f"warning: {divisibility.why}; {replicas} replicas, as asked for, train the mean of their losses",
            otherwise=True,
        )
    remedy = "" if divisibility.kind == "whole" else f": {_remedy(divisibility, micro_batches)}"
    remedy += "" if divisibility.kind == "whole" else f", and {_gain(rule, micro_batches)}"
    return MicroBatchChoice(1, f"1 micro-batch for each batch, not {micro_batches}, as {divisibility.why}{remedy}")


def _of_statistics(rule: UpdateRule, micro_batches: int, replicas: int, run: int, *, whole: bool) -> MicroBatchChoice:
    """For a model whose BatchNorms take statistics over rows: over all of a replica's (``whole``), or over parts.

    Args:
        rule: the update rule.
        micro_batches: M.
        replicas: R.
        run: into how many parts the first batch is cut.
        whole: whether M may be 1 instead.
    """
    if whole:
        of = "the rows of a replica" if replicas > 1 else "whole batches"
        like = "DistributedDataParallel(broadcast_buffers=False)" if replicas > 1 else "plain PyTorch"
        return MicroBatchChoice(
            1,
            f"1 micro-batch for each batch, not {micro_batches}, so that BatchNorm takes its statistics over {of}, as "
            f"in {like}; --micro-batches {micro_batches} takes them over parts, and {_gain(rule, micro_batches)}",
        )
    like = "data parallelism does" if replicas > 1 else "gradient accumulation in plain PyTorch does"
    instead = "" if replicas > 1 else "; --micro-batches 1 takes them over the whole batch"
    return MicroBatchChoice(
        micro_batches,
        f"BatchNorm takes its statistics over each of {run} micro-batches, as {like}{instead}",
        otherwise=True,
    )


def _gain(rule: UpdateRule, micro_batches: int) -> str:
    """What the default number of micro-batches would gain, in words, where there are two for each worker."""
    workers = micro_batches // 2
    most = workers * micro_batches / (micro_batches + workers - 1)
    return f"lets {workers} workers compute at the same time: at most {most:.2g} times as fast as in turns"


def _not_the_mean(rule: UpdateRule, divisibility: Divisibility, parts: int, given: int, *, dealt: bool) -> PlanError:
    """The refusal of a default that would train another loss.

    Args:
        rule: the update rule.
        divisibility: why not.
        parts: into which a batch would be cut.
        given: what --micro-batches would say.
        dealt: whether it is a layout's default.
    """
    what = "layout" if dealt else "rule"
    return PlanError(
        f"{'a layout with ' * dealt}rule {rule.name} without a number of micro-batches",
        got=divisibility.why,
        expected=f"a loss that is the mean of those of {parts} micro-batches: this {what} works on several of every "
        "batch",
        remedy=f"{'' if dealt else 'Give --rule 1f1b, which trains whole batches, or '}{_remedy(divisibility, given)}.",
    )


def _remedy(divisibility: Divisibility, micro_batches: int) -> str:
    if divisibility.kind == "whole":
        return "batches that can be cut by rows"
    if divisibility.kind == "counts":
        return f"--micro-batches {micro_batches} cuts it, and counts every part"
    return (
        "a loss that averages over other things than rows may return (sum, count); "
        f"--micro-batches {micro_batches} trains the mean of the parts' losses instead"
    )
