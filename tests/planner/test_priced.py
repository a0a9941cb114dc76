"""Candidates priced where there is no torch: what is sent and exchanged is what ``roundelay.plan`` says."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from roundelay.ir.graph import Profile
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.planner.cost_model import CostParameters, stage_costs
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import batch_s, priced
from roundelay.planner.source import Hardware
from roundelay.planning import collect_facts as collect_facts_module
from roundelay.planning import make_plan
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.stage_profiler import StageProfile

#: prices what each line of standard input says, in a process that cannot import torch
PRICER = """
import json, sys
sys.modules["torch"] = None
from pathlib import Path
from roundelay.planner.plan_options import Choices
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.price import batch_s, priced
from roundelay.planner.source import Hardware
for line in sys.stdin:
    facts, choices, machine = json.loads(line)
    made = priced(ModelFacts.decode(Path(facts).read_bytes()), Choices(**choices), Hardware(**machine))
    print(json.dumps([made.plan.text(), made.batch_s]))
"""


class Perceptron(nn.Module):
    """Four layers, of which one is frozen and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x)) + 0.0 * self.unused(x).detach().sum()


class Block(nn.Module):
    """Attention and a perceptron, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Transformer(nn.Module):
    """Two blocks, and an embedding that the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.table(x))).flatten(0, 1)


class Images(nn.Module):
    """Convolutions with BatchNorm, and two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.first(x)).relu()
        return self.head((x + self.second(x)).flatten(1))


def batch_of(kind: type[nn.Module], seed: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    if kind is Transformer:
        words = torch.randint(20, (8, 6), generator=chance)
        return words, words.roll(1, 1)
    shape = (8, 12) if kind is Perceptron else (8, 3, 6, 6)
    return torch.randn(shape, generator=chance), torch.randint(4, (8,), generator=chance)


def job(kind: type[nn.Module]) -> Job:
    torch.manual_seed(0)

    def batches(epoch: int) -> Iterator[Any]:
        yield from (batch_of(kind, 10 * epoch + i) for i in range(3))

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[1].flatten())

    return Job(
        model=kind(), loss=loss, batches=batches, optimizer=lambda named: torch.optim.Adam([w for _, w in named], 1e-3)
    )


ON_CPU: dict[str, Any] = {"devices": "cpu"}
CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Perceptron, {"workers": 2, "cuts": "equal"}),
    (Perceptron, {"workers": 3, "rule": "pipeoptim", "cuts": "roofline", "micro_batches": 2}),
    (Perceptron, {"workers": 2, "rule": "zb-h1", "cuts": "equal", "clip": "global:1"}),
    (Perceptron, {"workers": 2, "data_parallel": 2, "cuts": "equal"}),
    (Perceptron, {"workers": 1, "data_parallel": 3, "zero": 1, "rule": "pipedream-2bw"}),
    (Perceptron, {"workers": 2, "tensor_parallel": 2, "cuts": "equal"}),
    (Perceptron, {"layout": "dp", "micro_batches": 3, "stages": 2, "cuts": "equal"}),
    (Perceptron, {"layout": "mp", "micro_batches": 3, "stages": 3, "cuts": "equal", "rule": "cdp-v1"}),
    (Perceptron, {"layout": "single", "micro_batches": 4, "stages": 2, "cuts": "flops"}),
    (Transformer, {"workers": 2, "cuts": "equal"}),
    (Transformer, {"workers": 2, "tensor_parallel": 2, "cuts": "equal", "micro_batches": 2}),
    (Transformer, {"workers": 1, "tensor_parallel": 4, "data_parallel": 2}),
    (Transformer, {"workers": 2, "rule": "zb-v", "cuts": "equal", "micro_batches": 4}),
    (Transformer, {"workers": 3, "rule": "rehearse", "cuts": "flops", "recompute": "blocks.0"}),
    (Transformer, {"workers": 2, "data_parallel": 2, "zero": 1, "rule": "pipedream-2bw", "cuts": "equal"}),
    (Transformer, {"workers": 2, "precision": "bf16", "cuts": "equal"}),
    (Images, {"workers": 2, "cuts": "equal"}),
    (Images, {"workers": 2, "rule": "pipedream", "cuts": "equal", "micro_batches": 2, "backward": "stash"}),
    (Images, {"layout": "zero", "micro_batches": 2, "stages": 2, "cuts": "equal", "rule": "cdp-v1"}),
    (Images, {"workers": 2, "rule": "gpipe", "backward": "recompute", "micro_batches": 4, "cuts": "flops"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The facts of each model and precision, one file each."""
    place = tmp_path_factory.mktemp("facts")
    for kind, precision in {(kind, choices.get("precision", "fp32")): None for kind, choices in CASES}:
        facts = facts_of(kind, precision)
        data = facts.encode()
        assert ModelFacts.decode(data) == facts
        (place / f"{kind.__name__}-{precision}").write_bytes(data)
    return place


def facts_of(kind: type[nn.Module], precision: str) -> ModelFacts:
    made = job(kind)
    return collect_facts(Examined(made, roundelay.capture(made), 0, lambda _: None), precision=precision)


@pytest.fixture(scope="module")
def without_torch(folder: Path) -> list[tuple[Plan, float]]:
    """Every case as it is priced in a process that cannot import torch."""
    machine = asdict(hardware_here())
    lines = [
        json.dumps([str(folder / f"{kind.__name__}-{choices.get('precision', 'fp32')}"), ON_CPU | choices, machine])
        for kind, choices in CASES
    ]
    done = run([sys.executable, "-c", PRICER], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(Plan.parse(text), seconds) for text, seconds in map(json.loads, done.stdout.splitlines())]


@pytest.mark.filterwarnings("ignore::roundelay.PlanWarning")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_sent_and_exchanged_is_what_a_plan_says(number: int, without_torch: list[tuple[Plan, float]]) -> None:
    kind, choices = CASES[number]
    plan = roundelay.plan(job(kind), **ON_CPU | choices)
    found, seconds = without_torch[number]
    measured = {"stages", "read_s", "deadline_s"}
    for one in fields(Plan):
        if one.name not in measured:
            assert getattr(found, one.name) == getattr(plan, one.name), one.name
    for own, theirs in zip(found.stages, plan.stages, strict=True):
        assert (own.workers, own.segments) == (theirs.workers, theirs.segments)
        assert own.parameter_bytes == theirs.parameter_bytes
        assert own.forward_s > 0
        assert own.backward_s + own.weights_s > 0
    assert seconds > 0


def test_more_workers_take_less_time() -> None:
    """Of a model whose operations are slow, from one collection."""
    facts, machine = facts_of(Perceptron, "fp32"), Hardware(4, 4)
    slow = tuple(
        [
            replace(one, profile=type(one.profile)(*([0.01] * len(p) for p in columns(one.profile))))
            for one in facts.measured
        ]
    )
    facts = replace(facts, measured=slow)
    times = {
        n: priced(facts, Choices(workers=n, rule="1f1b", micro_batches=4, cuts="measured"), machine).batch_s
        for n in (1, 2, 3)
    }
    assert times[3] < times[2] < times[1]


def columns(profile: Any) -> list[Any]:
    return [profile.forward_s, profile.backward_s, profile.update_s]


def test_what_was_not_collected_is_told() -> None:
    facts = facts_of(Perceptron, "fp32")
    with pytest.raises(roundelay.RoundelayError, match="the facts of the model: the model's precision: got bf16"):
        priced(facts, Choices(workers=2, precision="bf16"), Hardware(2, 2))


@pytest.mark.parametrize(
    ("choices", "machine"),
    [({"transport": "nccl"}, Hardware(16, 16, 2)), ({"devices": "cpu,cuda:0"}, Hardware(16, 16, 1))],
    ids=["by default", "given"],
)
def test_seconds_of_the_cpu_are_no_price_of_a_gpu(choices: dict[str, Any], machine: Hardware) -> None:
    """Nor is a plan for one made of them."""
    facts = facts_of(Perceptron, "fp32")
    with pytest.raises(roundelay.RoundelayError, match="the price of a plan: got workers on cuda:0"):
        priced(facts, Choices(workers=2, cuts="equal", **choices), machine)


def test_an_update_takes_what_the_job_s_own_optimizer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided over the operations as the copying of their weights; that alone where the optimizer cannot step."""
    for whole_s in (0.5, 0.0, 2.0):
        monkeypatch.setattr(collect_facts_module, "step_s", lambda *_, told_s=whole_s: told_s)
        for one in facts_of(Perceptron, "fp32").measured:
            updates = one.profile.update_s
            assert sum(updates) == pytest.approx(whole_s) if whole_s else 0 < sum(updates) < 0.1
            assert sum(1 for seconds in updates if seconds) > 2


def test_what_is_kept_of_a_model_changes_no_plan() -> None:
    """Plans made one after the other of the same facts are those that each makes of its own."""
    kept = ModelFacts.decode(facts_of(Transformer, "fp32").encode())
    sizes: list[dict[str, Any]] = [
        {"workers": 1, "data_parallel": 2},
        {"workers": 2, "tensor_parallel": 2},
        {"workers": 1, "data_parallel": 2, "tensor_parallel": 2},
        {"workers": 2, "data_parallel": 4},
    ]
    others: list[dict[str, Any]] = [
        {},
        {"zero": 1},
        {"zero": 3},
        {"recompute": "blocks.0"},
        {"rule": "pipeoptim"},
        {"rule": "pipeoptim", "zero": 1},
        {"cuts": "measured"},
        {"micro_batches": 4, "cuts": "measured"},
        {"cuts": "roofline"},
    ]
    machine = Hardware(2, 2)
    for size in sizes:
        for other in others:
            if "zero" in other and "data_parallel" not in size:
                continue
            choices = Choices(**{"rule": "1f1b", "micro_batches": 2, "cuts": "equal"} | size | other)
            made = priced(kept, choices, machine)
            assert made == priced(replace(kept), choices, machine), choices
            if other in ({}, {"zero": 1}):
                assert ("weight" in {one.kind for one in made.plan.exchanges}) == (other == {"zero": 1})
    assert 0 < len(kept.memo) < len(sizes) * len(others) * 4


def test_adding_up_gradients_takes_its_share_of_every_micro_batch_but_the_first() -> None:
    facts = facts_of(Perceptron, "fp32")
    assert all(sum(one.profile.add_s) > 0 for one in facts.measured)

    def with_sums(seconds: float) -> ModelFacts:
        rows = [replace(o, profile=replace(o.profile, add_s=(seconds,) * len(o.profile.add_s))) for o in facts.measured]
        return replace(facts, measured=tuple(rows))

    def backward_s(facts: ModelFacts, micro_batches: int, rule: str, workers: int) -> float:
        choices = Choices(rule=rule, micro_batches=micro_batches, workers=workers)
        return sum(s.backward_s + s.weights_s for s in priced(facts, choices, Hardware(2, 2)).plan.stages)

    count = len(facts.graph.ops) + 1
    for rule, workers in (("1f1b", 1), ("zb-h1", 2)):
        for number in (1, 2, 4):
            own = [backward_s(with_sums(seconds), number, rule, workers) for seconds in (0.0, 0.25)]
            assert own[1] - own[0] == pytest.approx(0.25 * count * (number - 1) / number, rel=1e-3), (rule, number)


def test_a_rule_that_does_not_drain_costs_its_slowest_stage_once_the_pipeline_is_full() -> None:
    facts = facts_of(Perceptron, "fp32")
    free = {"latency_s": 0.0, "bytes_per_s": 1e18}
    plan = priced(facts, Choices(rule="pipedream", workers=4), Hardware(4, 4)).plan
    stages = [replace(one, forward_s=1.0, backward_s=2.0, update_s=0.0) for one in plan.stages]
    even = replace(plan, stages=tuple(stages), read_s=0.0, **free)  # type: ignore[arg-type]
    assert batch_s(even) == pytest.approx(3.0, rel=1e-3)
    other = priced(facts, Choices(rule="1f1b", workers=4, micro_batches=1), Hardware(4, 4)).plan
    timed = [replace(one, forward_s=1.0, backward_s=2.0, update_s=0.0) for one in other.stages]
    drained = replace(other, stages=tuple(timed), read_s=0.0, **free)  # type: ignore[arg-type]
    assert batch_s(drained) == pytest.approx(12.0, rel=1e-3)


def test_cuts_and_planned_stages_count_the_adding_up_of_gradients_too() -> None:
    graph = facts_of(Perceptron, "fp32").graph
    length = len(graph.ops) + 1
    nothing, each = (0.0,) * length, (1.0,) * length
    terms = CostParameters(micro_batches=2, latency_s=0.0, bytes_per_s=math.inf)
    costs = stage_costs(graph, Profile(nothing, nothing, nothing, each), terms)
    assert costs.compute_s(0, length) == pytest.approx(length / 2)
    plan = priced(facts_of(Perceptron, "fp32"), Choices(workers=1, micro_batches=4), Hardware(2, 2)).plan
    spec: Any = SimpleNamespace(stages=[SimpleNamespace(parameters=())])
    for weights_s, own in ((0.0, (2.75, 0.0)), (1.0, (2.0, 1.75))):
        measured = StageProfile(1.0, 2.0, weights_s, 0.5, 1.0, 0, 0)
        (made,) = make_plan._stages(graph, plan, spec, [measured])
        assert (made.backward_s, made.weights_s) == own
