"""Choose the cuts: measured, predicted, in equal parts, for little memory, or given by the user; with the reasons."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from roundelay.cores import usable_cores
from roundelay.env import cache_folder, malloc_settings
from roundelay.errors import CaptureError, PlanError, counted
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, replace
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import WEIGHT, Graph, Profile
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.lower.reading import read
from roundelay.observe.profile_cache import keep, kept, machine, place
from roundelay.planner import cut_reasons
from roundelay.planner.check_given import check_num_workers
from roundelay.planner.choices import CutRequest
from roundelay.planner.cost_model import CostParameters, StageCosts, boundaries_of, roofline, stage_costs
from roundelay.planner.kept_bytes import SavedStorages, kept_bytes
from roundelay.planner.partition_dp import choose_cuts, equal_cuts, flops_cuts, names_of, staggered_cuts
from roundelay.planning.op_profiler import measure_operations
from roundelay.planning.recompute_choice import recomputed_ranges
from roundelay.planning.torch_scope import in_child, on_threads, user_code
from roundelay.runtime.device import default_devices, num_cuda_devices
from roundelay.schedules import schedule_named

MEASURED, ROOFLINE, EQUAL, FLOPS, MEMORY_TIME = WAYS = ("measured", "roofline", "equal", "flops", "memory-time")
"""How cuts are chosen: by a profile of this machine, by fixed constants, by numbers of operations or of their FLOPs, or
for the fewest activations that staggered micro-batches keep at one time, by a profile and a count of what is kept."""

_GIVEN = ("cuts: as given",)

Stages = tuple[tuple[str, ...], ...]
"""For each stage, the operations that end its segments."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The chosen stages.

    Args:
        stages: for each stage, the operations that end its segments.
        reasons: the reasons, in words.
    """

    stages: Stages
    reasons: tuple[str, ...]


def cut_by_names(graph: Graph, request: CutRequest) -> Cut | None:
    """Return the stages if they are given by names, None if they are to be chosen.

    Raises:
        PlanError: a name is unknown, or of no operation after which the graph can be cut.
    """
    if isinstance(request, str):
        return None if request in WAYS else _as_stages(_names(graph, request), _GIVEN)
    if any(isinstance(ends, str) for ends in request):
        raise PlanError(
            "the cuts",
            got=f"a list of {len(request)} names, not of lists of names",
            expected=f"one of {', '.join(WAYS)}, names with commas between them, or a list of names for every stage",
            remedy='For example cuts="equal", or cuts=[["add_1"], ["linear_7"]].',
        )
    return Cut(tuple(tuple(ends) for ends in request), _GIVEN)


def _names(graph: Graph, request: str) -> list[str]:
    names, last = [name.strip() for name in request.split(",")], graph.ops[-1].name
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


def default_workers(holders: int = 1, devices: str | None = None, transport: str = "memory") -> int:
    """The default number of workers of a replica; fewer if the model has fewer stages.

    One per device: those that are named, or every GPU if workers compute on GPUs. On the CPU one per core, at most two;
    one where several share a stage, so that R replicas are R workers.

    Args:
        holders: workers that share each stage.
        devices: as ``--devices``.
        transport: of the plan.
    """
    named = default_devices(transport) if devices is None else devices
    if named == CPU:
        return 1 if holders > 1 else min(2, usable_cores())
    count = num_cuda_devices() if named == "cuda" else len(named.split(","))
    return max(1, count // holders)


def count_stages(
    graph: Graph, workers: int | None, given: Cut | None, rule: str, default: int | None = None
) -> tuple[int, str]:
    """Return the number of stages, as given or for the workers; and why there are fewer than by default, if so.

    Args:
        graph: of the model.
        workers: of each replica, as given.
        given: the cut as given.
        rule: update rule.
        default: number of workers if none is given.

    Raises:
        PlanError: the numbers do not fit.
        CaptureError: the model cannot be cut into so many.
    """
    check_num_workers(workers)
    each = schedule_named(rule_named(rule).schedule).stages_per_worker
    if given is None:
        return _stages_for_workers(len(boundaries_of(graph)) - 1, workers, each, rule, default or default_workers())
    num_stages = len(given.stages)
    if num_stages % each or workers not in (None, num_stages // each):
        wanted = f"{each} for each worker" if workers is None else f"{each * workers}, {each} for each worker"
        raise PlanError(
            "the cuts",
            got=f"{num_stages} stages",
            expected=wanted if each > 1 else f"{workers}, one for each worker",
            remedy="Name one operation fewer than there are stages, or leave the number of workers out.",
        )
    return num_stages, ""


def _stages_for_workers(pieces: int, workers: int | None, each: int, rule: str, default: int) -> tuple[int, str]:
    """Return the number of stages for the workers given, or for the default number as far as the model can be cut.

    Raises:
        CaptureError: the model cannot be cut into so many.
    """
    most = pieces // each
    wanted = default if workers is None else workers
    if wanted <= most:
        return each * wanted, ""
    limit = f"can be cut into {counted(pieces, 'stage')} at most"
    if workers is None and most:
        return each * most, f"{counted(most, 'worker')}, not {wanted}: the model {limit}"
    per_worker = f", {each} for each worker by {rule}" if each > 1 else ""
    raise CaptureError(
        f"a cut into {each * wanted} stages, for {counted(wanted, 'worker')}",
        got=f"a model that {limit}",
        expected=f"at least {each * wanted} stages{per_worker}",
        remedy=f"Give --workers {most}, or a model of more operations."
        if most
        else "Give another rule: --rule 1f1b, for example, has one stage for each worker.",
    )


def cut(captured: Captured, draft: Plan, request: str, num_stages: int, sample: Callable[[], Batch]) -> Cut:
    """Choose the stages.

    Args:
        captured: the model.
        draft: the plan without stages.
        request: one of :data:`WAYS`.
        num_stages: D.
        sample: returns a micro-batch of the size that will be trained on; called only to measure.

    Raises:
        CaptureError: the model cannot be cut into so many stages.
        UserCodeError: the model or the loss raised while it was measured.
    """
    graph = captured.graph
    equal = equal_cuts(graph, num_stages)  # raises for too many stages, before anything is measured
    if request == EQUAL or num_stages == 1:
        reason = "cuts: as equal numbers of operations as can be"
        return _as_stages(names_of(graph, equal), (reason,) if num_stages > 1 else ())
    if request == FLOPS:
        by_flops = flops_cuts(graph, num_stages)
        return _as_stages(names_of(graph, by_flops), tuple(cut_reasons.equal_flops(graph, by_flops)))
    apart = not _on_one_worker(draft)
    terms = CostParameters(
        again=recomputed_ranges(graph, draft),
        micro_batches=draft.batch_parts,
        latency_s=draft.latency_s if apart else 0.0,
        bytes_per_s=draft.bytes_per_s if apart else math.inf,
    )
    if request == ROOFLINE:
        predicted = roofline(graph, sample_micro_batches(graph, terms.micro_batches))
        costs = stage_costs(graph, predicted, terms)
        return _fastest(graph, costs, num_stages, "predicted with fixed constants (roofline)")
    micro_batch = sample()
    profile, how = profiled(captured, micro_batch, draft.threads)
    costs = stage_costs(graph, profile, terms)
    if request == MEASURED:
        return _fastest(graph, costs, num_stages, how)
    return _fewest_bytes(captured, draft, costs, micro_batch, num_stages, how)


def _on_one_worker(draft: Plan) -> bool:
    """Whether a micro-batch stays on one worker, so that nothing is sent from stage to stage."""
    form = read(draft).form
    return form is not None and not form.stages_per_worker


def _fastest(graph: Graph, costs: StageCosts, num_stages: int, how: str) -> Cut:
    chosen = choose_cuts(costs, num_stages)
    return _as_stages(names_of(graph, chosen), (f"cuts: {how}", *cut_reasons.fastest(graph, costs, chosen)))


def _fewest_bytes(
    captured: Captured, draft: Plan, costs: StageCosts, micro_batch: Batch, num_stages: int, how: str
) -> Cut:
    """Cut for the fewest activations at one time, of the micro-batches of a batch, or of a pipeline's stages."""
    graph, form = captured.graph, read(draft).form
    with user_code("counting what the operations keep of the first micro-batch"):
        storages = saved_storages(captured, micro_batch)
    kept = kept_bytes(graph, storages, shared=_on_one_worker(draft), again=costs.parameters.again)
    size = num_stages if form is None else draft.batch_parts  # as a full pipeline is staggered
    chosen = staggered_cuts(costs, kept, num_stages, size)
    reasons = [f"cuts: {how}", *cut_reasons.fewest_bytes(graph, costs, kept, chosen, size)]
    if form is not None and (form.replicates or not form.staggered):
        reasons.append(cut_reasons.OWN_PACE if form.staggered else cut_reasons.AT_ONCE)
    return _as_stages(names_of(graph, chosen), tuple(reasons))


def _as_stages(ends: Sequence[str], reasons: tuple[str, ...]) -> Cut:
    return Cut(tuple((end,) for end in ends), reasons)


def profiled(captured: Captured, micro_batch: Batch, threads: int) -> tuple[Profile, str]:
    """Return a profile of every operation on one micro-batch, cached or new, and its origin in words.

    Args:
        captured: the model.
        micro_batch: of the size that will be trained on.
        threads: intra-op threads with which it will be computed.

    Raises:
        UserCodeError: the model or the loss raised.
    """
    with on_threads(threads), user_code("measuring the operations on the first micro-batch"):
        values = captured.values(micro_batch)
        key = {
            "model": captured.graph.fingerprint,
            "tensors": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in values.items()},
            "precision": captured.precision,
            "torch": torch.__version__,
            "threads": threads,
            "malloc": malloc_settings(),
            **machine(),
        }
        folder, length = cache_folder(), len(captured.graph.ops) + 1
        path = None if folder is None else place(folder, key)
        cached = None if path is None else kept(path, key, length)
        if cached is not None:
            return cached, f"measured on this machine at an earlier plan ({path})"
        profile = in_child(lambda: measure_operations(captured, micro_batch), "measuring the operations", Profile)
    if path is not None and keep(path, key, profile):
        return profile, f"measured on this machine now, and kept for the next plan ({path})"
    why = "nothing is to be kept" if path is None else f"{path} cannot be written"
    return profile, f"measured on this machine now; {why}, so the next plan may be cut elsewhere"


def saved_storages(captured: Captured, micro_batch: Batch) -> SavedStorages:
    """Run the model forward, operation by operation, and note the storages that the backward of each reads."""
    found, own = _Saved(captured), replace(micro_batch, lambda _, leaf: leaf.clone())  # it may be a view of the batch
    captured.walk(own, found.run)
    for name, tensor in captured.values(own).items():
        found.value(name, tensor)
    return SavedStorages(tuple(found.num_bytes), tuple(map(tuple, found.saved)), found.values, found.views)


class _Saved:
    """The storages of a run, by number. All stay alive, so that no address is used twice."""

    def __init__(self, captured: Captured) -> None:
        graph = captured.graph
        self.ops, self.saved = graph.ops, [dict[int, None]() for _ in range(len(graph.ops) + 1)]
        self.num_bytes = [weight.num_bytes for weight in graph.parameters.values()]  # a stage that gets one has a copy
        self.values = {WEIGHT + name: i for i, name in enumerate(graph.parameters)}
        self.views: dict[str, int] = {}
        self.weights = {weight.untyped_storage()._cdata for weight in captured.parameters().values()}
        self.numbers: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def run(self, i: int, call: Callable[[], Any]) -> Any:
        """Run an operation, as :meth:`~roundelay.frontend.Captured.walk` has it run."""
        with torch.autograd.graph.saved_tensors_hooks(partial(self._save, i), lambda tensor: tensor):
            output = call()
        if i == len(self.ops):
            self.saved[i] |= {self._number(root.detach()): None for root in output if root.requires_grad}
        elif isinstance(output, torch.Tensor):
            self.value(self.ops[i].name, output.detach())
        return output

    def _save(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in self.weights:
            self.saved[i][self._number(tensor)] = None
        return tensor

    def value(self, name: str, tensor: torch.Tensor) -> None:
        """Note the storage of a value; if it is not contiguous, another stage gets a copy."""
        plain = tensor.layout == torch.strided
        if plain and tensor.is_contiguous():
            self.values[name] = self._number(tensor)
            return
        if plain:
            self.views[name] = self._number(tensor)
        self.values[name] = len(self.num_bytes)
        self.num_bytes.append(tensor.numel() * tensor.element_size())

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.num_bytes)
            self.num_bytes.append(storage.nbytes())
            self.alive.append(tensor)
        return self.numbers[storage._cdata]
