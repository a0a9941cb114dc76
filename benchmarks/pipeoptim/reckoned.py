"""What needs no training: weight versions, batches that fit a budget, and throughput on a virtual clock.

All of it comes from plans: bytes as they are traced, seconds as they are predicted from FLOPs and bytes with fixed
constants (`planner/cost_model.py`), so that a busy machine changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

import roundelay
from benchmarks.common import table
from benchmarks.papers import Asked, D, optimizer
from benchmarks.pipeoptim import paper
from benchmarks.tasks import grammar, images
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.planner.cost_model import BYTES_PER_S, roofline
from roundelay.planner.memory_model import estimate_memory
from roundelay.planning.memory_report import optimizer_bytes
from roundelay.session.training import Length, Session

MIB = 2**20
SAME_ROWS = 64
"""Rows of a micro-batch in Figure 5, as in the paper."""

TOUCHED = 5
"""How often an update with momentum passes over a stage's weights: it reads three tensors of them and writes two."""

WARM, MORE = 8, 16
"""Batches simulated before the rate is taken, and those over which it is."""


@dataclass(frozen=True, slots=True)
class Method:
    """How one of the paper's methods is planned: rule, predictor, backward mode and micro-batches per batch."""

    rule: str
    predictor: str | None
    backward: str
    micro_batches: int


KEPT = {
    paper.GPIPE: Method("gpipe", None, "stash", 4),
    paper.PIPEDREAM: Method("pipedream", None, "stash", 1),
    paper.TWO_BW: Method("pipedream-2bw", None, "stash", D),
    paper.SPECTRAIN: Method("spectrain", "paper", "mixed", 1),
    paper.PIPEOPTIM: Method("pipeoptim", "paper", "mixed", 1),
}
"""Nothing is computed twice."""

RECOMPUTED = {
    title: replace(method, backward="recompute") if rule_named(method.rule).modes != ("stash",) else method
    for title, method in KEPT.items()
}
"""The paper recomputes under every method; here a rule with a stash keeps its tapes, as no other mode is its own."""


READS = {"forward": "what its forward read", "live": "the newest", "ahead": "a prediction from the newest"}
"""What a rule's backward reads, in words."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model whose batch has any size.

    Args:
        title: its name, and its optimizer's.
        budget: bytes of a worker in Table V.
        make: rows of a batch to a job.
    """

    title: str
    budget: int
    make: Callable[[int], roundelay.Job]


def _resnet(rows: int) -> roundelay.Job:
    torch.manual_seed(0)
    made = optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    job = replace(images.job(0, made), model=images.ResNet(width=48))
    return replace(job, batches=lambda epoch: [images.draw(rows, 0)])


def _translator(rows: int) -> roundelay.Job:
    torch.manual_seed(0)
    made = optimizer(torch.optim.Adam, lr=1e-3)
    return replace(grammar.job(0, made), batches=lambda epoch: [grammar.encode(grammar.draw(rows, 0))])


MODELS = (
    Model("ResNet-like, SGDM", 16 * MIB, _resnet),
    Model("transformer, Adam", 3 * MIB, _translator),
)
PAPER_S = ("ResNet-101, SGDM", "GNMT-8, Adam")
"""Rows of the paper's Table V beside ours."""


@functools.cache
def captured(model: Model, rows: int) -> tuple[roundelay.Job, Captured]:
    """The job with that many rows in a batch."""
    job = model.make(rows)
    return job, roundelay.capture(job)


@functools.cache
def stages_of(model: Model) -> list[list[str]]:
    """Where the model is cut, whatever the batch: as a batch of 64 rows is best cut."""
    job, graph = captured(model, SAME_ROWS)
    plan = roundelay.plan(job, captured=graph, workers=D, rule="gpipe", micro_batches=1, cuts="roofline")
    return [list(stage.segments) for stage in plan.stages]


@functools.cache
def planned(model: Model, method: Method, rows: int) -> Plan:
    """The plan with that many rows in a micro-batch."""
    job, graph = captured(model, rows * method.micro_batches)
    chosen = {"predictor": method.predictor} if method.predictor else {}
    return roundelay.plan(
        job,
        captured=graph,
        workers=D,
        rule=method.rule,
        backward=method.backward,
        micro_batches=method.micro_batches,
        cuts=stages_of(model),
        transport="memory",
        **chosen,
    )


@functools.cache
def timed(model: Model, method: Method, rows: int) -> Plan:
    """The plan with seconds by a roofline in place of measured ones: as `--cuts roofline` reckons, and an update;
    data take none.
    """
    plan = planned(model, method, rows)
    job, graph = captured(model, rows * method.micro_batches)
    profile = roofline(graph.graph, method.micro_batches)
    stages = []
    for stage, spec in zip(plan.stages, Session(job, graph, plan, 0, Length(steps=1)).partition.stages, strict=True):
        own = slice(spec.segments[0].start, spec.segments[-1].stop)
        seconds = {"forward_s": sum(profile.forward_s[own]), "backward_s": sum(profile.backward_s[own])}
        stages.append(replace(stage, **seconds, update_s=TOUCHED * stage.parameter_bytes / BYTES_PER_S))
    return replace(plan, stages=tuple(stages), read_s=0.0)


# Table II -------------------------------------------------------------------------------------------------------------


def table_ii(what: Asked) -> str:
    """Versions that each stage holds, and by how much its forwards are early, counted on the virtual clock."""
    rows = []
    for title, method in KEPT.items():
        if title == paper.GPIPE:
            continue
        simulated = roundelay.simulate(timed(MODELS[0], method, 4), batches=WARM + MORE)
        held = [worker.versions_held_peak for worker in simulated.workers]
        late = [worker.versions_read[1] for worker in simulated.workers]
        ahead = [max(i.distance for i in simulated.intervals_of(k) if i.opcode == "forward") for k in range(D)]
        reads = READS[rule_named(method.rule).backward_reads(method.backward)]
        rows.append(
            [
                title,
                " ".join(map(str, held)),
                paper.WEIGHTS_MEMORY[title],
                " ".join(map(str, late)),
                " ".join(map(str, ahead)),
                reads,
            ]
        )
    columns = [
        "rule",
        "versions held",
        "paper: weights memory",
        "updates a forward misses",
        "predicted",
        "backward reads",
    ]
    return table(columns, rows) + (
        "\n\nEach of stages 0 to 3, the most that occurs; M in the paper's column: one version of a stage. A forward "
        "misses the updates that its stage makes before its batch's own."
    )


# Table V --------------------------------------------------------------------------------------------------------------


def needed(model: Model, method: Method, rows: int) -> list[int]:
    """Bytes of each worker, with the tape that a recomputed forward makes again for its backward."""
    plan = timed(model, method, rows)
    job, graph = captured(model, rows * method.micro_batches)
    state = optimizer_bytes(job, graph, Session(job, graph, plan, 0, Length(steps=1)).partition, plan)
    assert state is not None, "torch's own optimizers say what they hold"
    again = [0] * D
    if method.backward == "recompute":
        kept = replace(method, rule="gpipe", predictor=None, backward="stash")
        again = [stage.tape_bytes for stage in timed(model, kept, rows).stages]
    return [one.total + tape for one, tape in zip(estimate_memory(plan, state), again, strict=True)]


def largest(model: Model, method: Method) -> int:
    """The most rows of a micro-batch whose ledger fits the budget: by a straight line, then a row at a time.

    The line is not exact where the clock has other messages unread at other sizes.
    """
    low, high = 8, 16
    ends = zip(needed(model, method, low), needed(model, method, high), strict=True)
    rows = min(int(low + (model.budget - least) * (high - low) / (most - least)) for least, most in ends)
    while rows > 1 and max(needed(model, method, rows)) > model.budget:
        rows -= 1
    while max(needed(model, method, rows + 1)) <= model.budget:
        rows += 1
    return rows


@functools.cache
def fitting(model: Model) -> Mapping[str, int]:
    """Method to its largest micro-batch."""
    return {title: largest(model, method) for title, method in RECOMPUTED.items()}


def table_v(what: Asked) -> str:
    """Rows of the largest micro-batch; the paper's in brackets."""
    rows = []
    for model, of_paper in zip(MODELS, PAPER_S, strict=True):
        theirs = paper.LARGEST_BATCH[of_paper]
        cells = [str(fitting(model)[t]) + (f" [{theirs[t]}]" if t in theirs else "") for t in paper.TITLES]
        rows.append([f"{model.title}, {model.budget // MIB} MiB", of_paper, *cells])
    return table(["ours", "paper", *paper.TITLES], rows)


# Figures 5 and 6 ------------------------------------------------------------------------------------------------------


def rate(model: Model, method: Method, rows: int) -> float:
    """Rows per virtual second once the pipe is full."""
    plan = timed(model, method, rows)
    early, late = (roundelay.simulate(plan, batches=count).makespan_s for count in (WARM, WARM + MORE))
    return MORE * rows * method.micro_batches / (late - early)


def rates(methods: Mapping[str, Method], rows_of: Callable[[Model, str], int], claim: str) -> str:
    """Throughput by method, as a multiple of GPipe's."""
    rows = []
    for model in MODELS:
        found = {title: rate(model, method, rows_of(model, title)) for title, method in methods.items()}
        rows.append([model.title, *(f"{found[title] / found[paper.GPIPE]:.2f}" for title in paper.TITLES)])
    return table(["model", *paper.TITLES], rows) + f"\n\nThe paper: {claim}."


def figure_5(what: Asked) -> str:
    """The same rows per micro-batch for all; nothing recomputed."""
    return rates(KEPT, lambda model, title: SAME_ROWS, paper.FIGURE_5)


def figure_6(what: Asked) -> str:
    """The rows and the modes of Table V."""
    return rates(RECOMPUTED, lambda model, title: fitting(model)[title], paper.FIGURE_6)
