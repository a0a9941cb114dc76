"""``roundelay plan --search --space all``: the best signatures of every operation on a declared cluster."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundelay.api import capture
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.screen import doing, show_json
from roundelay.ir.device_names import CPU
from roundelay.ir.graph import Profile
from roundelay.ir.num_bytes import parse_bytes
from roundelay.ir.plan import WorkerPlan
from roundelay.planner.cluster import Cluster, read_cluster
from roundelay.planner.cost_model import FLOPS_PER_S, roofline
from roundelay.planner.draft_plan import PLAIN, draft_plan
from roundelay.planner.plan_options import DEADLINE_S, Choices
from roundelay.planning.examined import Examined
from roundelay.planning.job_file import load_job
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.searched import SearchedSignatures, signatures_on, table


def signatures_command(job_file: Path, choices: Choices, seed: int, *, as_json: bool) -> None:
    """Search, and print what is found; it is no plan, as the runtime has one axis beside the replicas.

    Args:
        job_file: defines the job.
        choices: of which `cluster`, a file with a mesh, `micro_batches`, `precision` and `memory_limit` count.
        seed: of the data.
        as_json: print one JSON object.
    """
    paths = PathResolver()
    job = load_job(job_file, seed)
    cluster = read_cluster(paths.of(Path(str(choices.cluster))), "mesh")
    with doing("Capturing the model ...", as_json) as show_wait:
        captured = capture(job, seed=seed, deadline_s=choices.deadline_s or DEADLINE_S, tell=show_wait)
    with doing("Measuring the model's operations ...", as_json) as show_wait:
        draft = draft_plan(captured.graph.fingerprint, PLAIN, 1, Choices(precision=choices.precision))
        source = Examined(job, captured, seed, show_wait).lowered(draft)
        profile = _profile(source, cluster, choices.micro_batches or 1)
    links = {name: Link(axis.latency_s, axis.bytes_per_s) for name, axis in cluster.mesh.items()}
    memory = None if choices.memory_limit is None else parse_bytes(choices.memory_limit, "--memory-limit")
    began = time.perf_counter()
    with doing("Searching ...", as_json):
        facts = source.mesh_facts()
        found = signatures_on(
            facts, cluster.sizes, links, profile, micro_batches=choices.micro_batches or 1, memory=memory
        )
    seconds = time.perf_counter() - began
    if as_json:
        show_json(_json(found, seconds))
    else:
        sys.stdout.write(table(found, facts.graph) + f"\nsearched in {seconds:.2f} s\n")


def _profile(source: Examined, cluster: Cluster, micro_batches: int) -> Profile:
    """Seconds of operations on a micro-batch: as measured here, or by the rate that the cluster declares."""
    draft = draft_plan(source.graph.fingerprint, PLAIN, 1, Choices(micro_batches=micro_batches))
    if not cluster.flops_per_s:
        return source.profile(replace(draft, workers=(WorkerPlan(name="w0", device=CPU, threads=1),)))[0]
    rows, rate = roofline(source.graph, micro_batches), FLOPS_PER_S / cluster.flops_per_s
    return Profile(*(tuple([own * rate for own in part]) for part in (rows.forward_s, rows.backward_s, rows.update_s)))


def _json(found: SearchedSignatures, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "batch_s": found.seconds,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "space": str(found.space),
        "space_of": found.where,
        "mesh": dict(found.mesh),
        "memory_bytes": found.memory,
        "terms": dict(found.terms),
        "parameters": {name: [[axis, str(own)] for axis, own in lay] for name, lay in found.parameters.items()},
        "values": {name: [[axis, str(own)] for axis, own in lay] for name, lay in found.values.items()},
        "boxings": [
            {"value": one.value, "reader": one.reader, "forward": list(map(str, one.forward)), "seconds": one.seconds}
            for one in found.boxings
        ],
        "not_runnable": found.not_runnable,
    }
