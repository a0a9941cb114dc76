"""Cells of the table of equivalences: one configuration each, and what it takes to verify one.

A cell is a model of the zoo, a variant (rule, predictor, backward mode), an optimizer, a number of stages D, of
micro-batches M, and a transport. It holds if five updates, with short batches among them, end with the same bits in the
distributed run and in the one-process reference.

Plans are made from one planned template per model and D. Rule, predictor, backward mode, M and transport are fields
that no measurement enters, and what was measured is read by the simulator alone; ``verify`` proves every plan anew. So
a derived plan runs exactly as a planned one would.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from roundelay.frontend import Captured
from roundelay.ir.plan import Plan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.ir.transports import transport_named
from roundelay.job import Job, Named
from roundelay.lower.reading import read
from roundelay.planner.plan_exchanges import plan_exchanges
from roundelay.planning.on_mesh import laid_of
from roundelay.planning.planning import capture, fitted, plan
from roundelay.planning.stage_profiler import profile
from roundelay.proof.run_vs_reference import Verification, verify_session
from roundelay.schedules import schedule_named
from roundelay.session.training import Length, Session, Trained
from roundelay.transport.endpoint import Endpoint
from tests.lower.plans import by_rule
from tests.transport.delayed import DelayedEndpoint
from tests.zoo import MODELS, ZOO, Batch, Entry

STEPS = 5
MAX_DELAY_S = 0.001
DEADLINE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What a plan says of its update rule."""

    rule: str
    predictor: str
    backward: str


VARIANTS = {
    "gpipe": Variant("gpipe", "none", "stash"),
    "gpipe recompute": Variant("gpipe", "none", "recompute"),
    "gpipe mixed": Variant("gpipe", "none", "mixed"),
    "1f1b": Variant("1f1b", "none", "stash"),
    "1f1b recompute": Variant("1f1b", "none", "recompute"),
    "1f1b mixed": Variant("1f1b", "none", "mixed"),
    "zb-h1": Variant("zb-h1", "none", "stash"),
    "zb-h1 recompute": Variant("zb-h1", "none", "recompute"),
    "zb-h1 mixed": Variant("zb-h1", "none", "mixed"),
    "interleaved-1f1b": Variant("interleaved-1f1b", "none", "stash"),
    "interleaved-1f1b recompute": Variant("interleaved-1f1b", "none", "recompute"),
    "interleaved-1f1b mixed": Variant("interleaved-1f1b", "none", "mixed"),
    "zb-v": Variant("zb-v", "none", "stash"),
    "zb-v recompute": Variant("zb-v", "none", "recompute"),
    "zb-v mixed": Variant("zb-v", "none", "mixed"),
    "pipedream": Variant("pipedream", "none", "stash"),
    "pipedream-vertical": Variant("pipedream-vertical", "none", "stash"),
    "pipedream-2bw": Variant("pipedream-2bw", "none", "stash"),
    "cdp-v1": Variant("cdp-v1", "none", "stash"),
    "cdp-v2": Variant("cdp-v2", "none", "stash"),
    "async recompute": Variant("async", "none", "recompute"),
    "async mixed": Variant("async", "none", "mixed"),
    "spectrain improved mixed": Variant("spectrain", "improved", "mixed"),
    "spectrain improved recompute": Variant("spectrain", "improved", "recompute"),
    "spectrain paper mixed": Variant("spectrain", "paper", "mixed"),
    "spectrain paper recompute": Variant("spectrain", "paper", "recompute"),
    "lookahead stash": Variant("lookahead", "improved", "stash"),
    "lookahead mixed": Variant("lookahead", "improved", "mixed"),
    "lookahead recompute": Variant("lookahead", "improved", "recompute"),
    "rehearse mixed": Variant("rehearse", "partial", "mixed"),
    "rehearse recompute": Variant("rehearse", "partial", "recompute"),
} | {
    f"pipeoptim {predictor} {backward}": Variant("pipeoptim", predictor, backward)
    for predictor in ("improved", "paper", "released-code")
    for backward in ("stash", "recompute", "mixed")
}
PAIRED = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h1 recompute",
    "zb-v",
    "pipedream",
    "pipedream-vertical",
    "cdp-v1",
    "cdp-v2",
    "async mixed",
    "spectrain improved mixed",
    "spectrain paper mixed",
    "lookahead mixed",
    "rehearse mixed",
    "pipeoptim improved stash",
    "pipeoptim improved recompute",
    "pipeoptim paper mixed",
    "pipeoptim released-code recompute",
)
"""Variants that meet everything else in pairs; the table has them all."""


def _sgd(named: Named) -> Optimizer:
    return SGD(named, lr=0.05)


def _momentum(named: Named) -> Optimizer:
    return SGD(named, lr=0.02, momentum=0.9)


def _nesterov(named: Named) -> Optimizer:
    return SGD(named, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)


def _adam(named: Named) -> Optimizer:
    return Adam(named, lr=2e-3)


def _adamw(named: Named) -> Optimizer:
    return AdamW(named, lr=2e-3)


OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "adam": _adam,
    "adamw": _adamw,
}
STAGES = (1, 2, 3, 4)
MICRO_BATCHES = (1, 3, 4)
TRANSPORTS = ("memory", "shm", "gloo")
EVERY_TRANSPORT = (*TRANSPORTS, "grpc")
"""Those that the table may be asked for."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(ZOO),
    "variant": tuple(VARIANTS),
    "optimizer": tuple(OPTIMIZERS),
    "stages": STAGES,
    "micro_batches": MICRO_BATCHES,
    "transport": TRANSPORTS,
}
PAIRS = FACTORS | {"variant": PAIRED}


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One configuration; between processes, deliveries are delayed at random.

    A rule that reads the previous version by a table needs M >= D - 1: it gets so many micro-batches at least. A rule
    with two stages for each worker gets an even number of them.
    """

    model: str
    variant: str
    optimizer: str
    stages: int
    micro_batches: int
    transport: str

    def __str__(self) -> str:
        sizes = f"D={self.stages} M={self.micro_batches}"
        return " | ".join((self.model, self.variant, self.optimizer, sizes, self.transport))


class Bench:
    """A captured model of the zoo, put back to its first weights before every run.

    Args:
        entry: the model.
        model: it, built; by default ``entry.build(0)``.
        batches: those of one epoch.
    """

    def __init__(self, entry: Entry, model: torch.nn.Module | None = None, batches: list[Batch] | None = None) -> None:
        self.entry = entry
        self.model = model or entry.build(0)
        self.batches = batches or entry.batches(0, STEPS, short=True)
        self.state = {n: t.detach().clone() for n, t in self._tensors()}
        self.captured: Captured = capture(self.job())
        self._templates: dict[int, Plan] = {}
        self._on_mesh: dict[tuple[Any, ...], Plan] = {}
        self._in_layout: dict[tuple[Any, ...], Plan] = {}

    def job(self, optimizer: Callable[[Named], Optimizer] = _adamw, **more: Any) -> Job:
        """The model's job with an optimizer; ``more`` are further fields of a job."""
        fields = {"loss": self.entry.loss, "batches": lambda epoch: self.batches, "inputs": self.entry.inputs} | more
        return Job(model=self.model, optimizer=optimizer, **fields)

    def plan(self, variant: Variant, num_stages: int, micro_batches: int, transport: str = "memory") -> Plan:
        """A plan derived from the template of ``num_stages``, or of one more where a worker has two."""
        num_stages += num_stages % stages_per_worker(variant)
        if num_stages not in self._templates:
            self._templates[num_stages] = plan(
                self.job(),
                workers=num_stages,
                rule="gpipe",
                micro_batches=1,
                captured=self.captured,
                deadline_s=DEADLINE_S,
                cuts="roofline",
            )
        link = transport_named(transport)
        return dataclasses.replace(
            by_rule(self._templates[num_stages], variant.rule),
            **dataclasses.asdict(variant),
            micro_batches=micro_batches,
            transport=transport,
            latency_s=link.latency_s,
            bytes_per_s=link.bytes_per_s,
        )

    def replicated(self, plan: Plan, replicas: int) -> Plan:
        """The plan with so many replicas of its workers, as planning makes it."""
        count = plan.num_workers
        stages, sample = fitted(self.captured, plan), self.batches[0]
        unused = [part.unused for part in profile(self.captured, stages, sample, "stash", repeats=1)]
        home = [plan.worker_of(stage) for stage in range(plan.num_stages)]
        return dataclasses.replace(
            plan,
            replicas=replicas,
            workers=tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(replicas * count)),
            stages=tuple(
                dataclasses.replace(stage, workers=tuple(f"w{r * count + own}" for r in range(replicas)))
                for stage, own in zip(plan.stages, home, strict=True)
            ),
            exchanges=plan_exchanges(
                laid_of(self.captured), stages, read(dataclasses.replace(plan, replicas=replicas)), unused
            ),
        )

    def on_mesh(
        self, name: str, stages: int, micro_batches: int, parts: int, replicas: int = 1, transport: str = "memory"
    ) -> Plan:
        """A plan of a variant with the stages on a mesh of so many workers, as planned and read from a file."""
        variant = VARIANTS[name]
        asked = variant, stages, micro_batches, parts, replicas, transport
        if asked not in self._on_mesh:
            stages += stages % stages_per_worker(variant)
            self._on_mesh[asked] = plan(
                self.job(),
                workers=stages // stages_per_worker(variant),
                micro_batches=allowed(variant, stages, micro_batches),
                tensor_parallel=parts,
                data_parallel=replicas,
                captured=self.captured,
                deadline_s=DEADLINE_S,
                cuts="roofline",
                transport=transport,
                rule=variant.rule,
                backward=variant.backward,
                **({} if variant.predictor == "none" else {"predictor": variant.predictor}),
            )
        return Plan.parse(self._on_mesh[asked].text())

    def in_layout(self, layout: str, rule: str, size: int, stages: int, transport: str = "memory") -> Plan:
        """A plan of a form of cyclic data parallelism with N micro-batches, as planned and read from a file."""
        asked = layout, rule, size, stages
        if asked not in self._in_layout:
            self._in_layout[asked] = plan(
                self.job(),
                layout=layout,
                rule=rule,
                micro_batches=size,
                stages=stages,
                captured=self.captured,
                deadline_s=DEADLINE_S,
                cuts="roofline",
            )
        link = transport_named(transport)
        here = dataclasses.replace(
            self._in_layout[asked], transport=transport, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s
        )
        return Plan.parse(here.text())

    def restore(self) -> None:
        """The weights and buffers that the model was built with."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                tensor.copy_(self.state[name])

    def verify(self, plan: Plan, job: Job | None = None, **options: Any) -> Verification:
        """Verify from the first weights on; ``options``: ``steps``, ``epochs``, ``seed``, ``tamper``, ``wrap``."""
        self.restore()
        given = {"steps": STEPS, "wrap": None if plan.transport == "memory" else delays(0)} | options
        length = Length(steps=None if "epochs" in given else given["steps"], epochs=given.get("epochs"))
        session = Session(job or self.job(), self.captured, plan, given.get("seed", 0), length)
        return verify_session(session, given.get("tamper"), given["wrap"])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


@functools.cache
def bench(name: str) -> Bench:
    """The bench of a model of the zoo, captured once."""
    return Bench(MODELS[name])


def run_cell(cell: Cell, place: Bench) -> Verification:
    """Verify one cell."""
    variant = VARIANTS[cell.variant]
    plan = place.plan(variant, cell.stages, allowed(variant, cell.stages, cell.micro_batches), cell.transport)
    return place.verify(plan, place.job(OPTIMIZERS[cell.optimizer]))


def stages_per_worker(variant: Variant) -> int:
    """One, or two."""
    return schedule_named(rule_named(variant.rule).schedule).stages_per_worker


def allowed(variant: Variant, num_stages: int, micro_batches: int) -> int:
    """As many micro-batches as asked for, or the fewest that the rule's timing allows."""
    return max(micro_batches, num_stages - 1) if rule_named(variant.rule).versions == "table" else micro_batches


def delays(seed: int) -> Callable[[Endpoint], Endpoint]:
    """What holds back every delivery of an endpoint for up to a millisecond, differently on every worker."""
    return lambda endpoint: DelayedEndpoint(endpoint, seed * 100 + endpoint.worker, MAX_DELAY_S)


def trained(model: str, variant: str, stages: int) -> Trained:
    """A run from the model's first weights on, with short batches."""
    place = bench(model)
    place.restore()
    plan = place.plan(VARIANTS[variant], stages, 4)
    session = Session(place.job(OPTIMIZERS["adamw"]), place.captured, plan, 0, Length(steps=STEPS))
    return session.run(notify=lambda event: None)


def assert_same(one: Trained, other: Trained) -> None:
    """Two runs have the same losses, weights and buffers, to the bit."""
    assert one.micro_losses == other.micro_losses
    for ours, theirs in (
        (one.snapshot.parameters, other.snapshot.parameters),
        (one.snapshot.buffers, other.snapshot.buffers),
    ):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
