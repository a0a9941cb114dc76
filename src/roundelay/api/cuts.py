"""Where to cut: measured, predicted, in equal parts, or as the person says; and why, in words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise

import torch

from roundelay.api.torch_scope import one_thread
from roundelay.env import cache_folder, malloc_settings
from roundelay.errors import PlanError, RoundelayError, UserCodeError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.frontend.op_profiler import measure_operations
from roundelay.ir.graph import Graph, Profile
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.observe.profile_cache import keep, kept, machine, place
from roundelay.planner.cost_model import CostParameters, Cuts, StageCosts, roofline, stage_costs
from roundelay.planner.partition_dp import choose_cuts, equal_cuts, names_of
from roundelay.runtime.forked_call import apart

MEASURED, ROOFLINE, EQUAL = WAYS = ("measured", "roofline", "equal")
"""How cuts are chosen: by a profile of this machine, by fixed constants, or by the number of operations."""

Stages = tuple[tuple[str, ...], ...]
"""For each stage the operations that end its segments."""

Asked = str | Sequence[Sequence[str]]
"""One of :data:`WAYS`; names of operations that end stages, with commas between them; or :data:`Stages`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages that were chosen.

    Args:
        stages: for each stage the operations that end its segments.
        reasons: why, in words.
    """

    stages: Stages
    reasons: tuple[str, ...]


def given_stages(graph: Graph, asked: Asked) -> Stages | None:
    """The stages if they were given by names, None if they are to be chosen.

    Raises:
        PlanError: a name is unknown, or of no operation after which the graph can be cut.
    """
    if isinstance(asked, str):
        return None if asked in WAYS else tuple((name,) for name in _names(graph, asked))
    if any(isinstance(ends, str) for ends in asked):
        raise PlanError(
            "the cuts",
            got=f"a list of {len(asked)} names, not of lists of names",
            expected=f"one of {', '.join(WAYS)}, names with commas between them, or a list of names for every stage",
            remedy='For example cuts="equal", or cuts=[["add_1"], ["linear_7"]].',
        )
    return tuple(tuple(ends) for ends in asked)


def _names(graph: Graph, asked: str) -> list[str]:
    names, last = [name.strip() for name in asked.split(",")], graph.ops[-1].name
    legal = [*(graph.ops[cut].name for cut in graph.cuts), last]
    for name in names:
        if name not in legal:
            near = difflib.get_close_matches(name, [*WAYS, *legal], n=4, cutoff=0.5)
            known = any(op.name == name for op in graph.ops)
            raise PlanError(
                "the cuts",
                got=f"{name!r}, " + ("an operation after which the graph cannot be cut" if known else "no operation"),
                expected=f"{', '.join(WAYS)}, or names of operations such as {', '.join(near or legal[:4])}",
                remedy="The comments of a plan name the operations that end its stages; "
                "roundelay.capture(job).graph has them all.",
            )
    return names if names[-1] == last else [*names, last]


def cut(captured: Captured, asked: str, num_stages: int, terms: CostParameters, sample: Callable[[], Batch]) -> Cut:
    """Choose the stages.

    Args:
        captured: the model.
        asked: one of :data:`WAYS`.
        num_stages: D.
        terms: what the plan has settled before.
        sample: a micro-batch of the size that will be trained on; asked for only to measure.

    Raises:
        CaptureError: the model cannot be cut into so many stages.
        UserCodeError: the model or the loss raised while it was measured.
    """
    graph = captured.graph
    if asked == EQUAL or num_stages == 1:
        ends = names_of(graph, equal_cuts(graph, num_stages))
        return _as_stages(ends, ("cuts: as equal numbers of operations as can be",) if num_stages > 1 else ())
    equal = equal_cuts(graph, num_stages)  # refuses too many stages, before anything is measured
    if asked == MEASURED:
        profile, how = profiled(captured, sample())
    else:
        profile, how = (
            roofline(graph, sample_micro_batches(graph, terms.micro_batches)),
            "predicted with fixed constants (roofline)",
        )
    prices = stage_costs(graph, profile, terms)
    chosen = choose_cuts(prices, num_stages)
    return _as_stages(names_of(graph, chosen), (f"cuts: {how}", *_told(prices, chosen, equal)))


def _as_stages(ends: Sequence[str], reasons: tuple[str, ...]) -> Cut:
    return Cut(tuple((end,) for end in ends), reasons)


def _told(prices: StageCosts, chosen: Cuts, equal: Cuts) -> Iterator[str]:
    """What was predicted for the chosen cuts, and for the equal ones."""
    times = [prices.stage_s(start, stop) for start, stop in pairwise(chosen)]
    for k, (start, stop) in enumerate(pairwise(chosen)):
        compute, talk = prices.compute_s(start, stop) * 1e3, prices.communication_s(start, stop) * 1e3
        slowest = ", the slowest" if times[k] == max(times) else ""
        yield f"stage {k}: {compute:.3f} ms of computing and {talk:.3f} ms of messages per micro-batch{slowest}"
    slow = prices.slowest_s(equal)
    yield f"cut into equal numbers of operations: {slow * 1e3:.3f} ms, {slow / max(times):.2f} times the slowest"
    yield "no slowest stage is more than 2 % faster; `--cuts roofline`, `--cuts equal`, `--cuts NAME,...` override it"


def profiled(captured: Captured, micro_batch: Batch) -> tuple[Profile, str]:
    """A profile of every operation on one micro-batch, kept or new, and how it was had, in words.

    Raises:
        UserCodeError: the model or the loss raised.
    """
    with users_code("measuring the operations on the first micro-batch"), one_thread():
        values = captured.values(micro_batch)
        key = {
            "model": captured.graph.fingerprint,
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in values.items()},
            "precision": captured.precision,
            "torch": torch.__version__,
            "threads": 1,
            "malloc": malloc_settings(),
            **machine(),
        }
        folder, length = cache_folder(), len(captured.graph.ops) + 1
        path = None if folder is None else place(folder, key)
        found = None if path is None else kept(path, key, length)
        if found is not None:
            return found, f"measured on this machine at an earlier plan ({path})"
        measured = apart(lambda: astuple(measure_operations(captured, micro_batch)), "measuring the operations")
        profile = Profile(*map(tuple, measured))
    if path is not None and keep(path, key, profile):
        return profile, f"measured on this machine now, and kept for the next plan ({path})"
    why = "nothing is to be kept" if path is None else f"{path} cannot be written"
    return profile, f"measured on this machine now; {why}, so the next plan may be cut elsewhere"


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Tell an exception of the person's own model or loss as what it is."""
    try:
        yield
    except (RoundelayError, MemoryError):
        raise
    except Exception as error:
        raise UserCodeError(
            what,
            got=f"{type(error).__name__}: {error}",
            expected="a model and a loss that can be computed again and again",
            remedy="Correct the model or the loss; ROUNDELAY_DEBUG=1 shows the traceback.",
        ) from error
