"""Stages on a mesh: every rule computes what its reference does, and what the model does without the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW

from roundelay.errors import JobError, PlanError
from roundelay.frontend.mesh import local_graph
from roundelay.ir.clip import Clip
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rules
from roundelay.ir.sbp import parse
from roundelay.lower.channels import channels_of, exchanges_of
from roundelay.lower.reading import read
from roundelay.planning.compile_stages import for_plan
from roundelay.proof import fidelity_on_mesh
from roundelay.proof.fidelity_on_mesh import differs_on_mesh
from roundelay.proof.tamper_ways import EXCHANGE_WAYS, WAYS
from roundelay.session.training import Length, Session, Trained
from tests.equivalence.cells import VARIANTS, Bench, bench
from tests.equivalence.test_replicas import _double
from tests.zoo import ZOO

BY_RULE = {variant.rule: name for name, variant in VARIANTS.items() if variant.backward != "recompute"}
RULES = [rule.name for rule in rules() if rule.name in BY_RULE and rule.name != "rehearse"]
MODELS = (
    "gpt2",
    "llama",
    "bert_classifier",
    "t5",
    "mlp",
    "skip",
    "tied_head",
    "dropout_heavy",
    "gru",
    "token_mean",
    "two_inputs",
)
"""Those of the zoo in which Megatron-LM's signatures are found."""


def held(place: Bench, plan: Plan, **options: Any) -> None:
    found = place.verify(plan, **options)
    assert found.equal, found.difference


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_computes_what_its_reference_does(rule: str) -> None:
    number = RULES.index(rule)
    place = bench(MODELS[number % 7])
    held(place, place.on_mesh(BY_RULE[rule], 2, 2, 2 + number % 2))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_does(model: str, parts: int) -> None:
    place = bench(model)
    held(place, place.on_mesh("1f1b", 1, 2, parts))


@pytest.mark.parametrize(
    ("name", "transport"), [("1f1b", "shm"), ("pipeoptim improved mixed", "gloo"), ("zb-h1", "gloo"), ("cdp-v2", "shm")]
)
def test_it_does_between_processes(name: str, transport: str) -> None:
    place = bench("gpt2")
    held(place, place.on_mesh(name, 2, 1, 2, transport=transport))


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "zb-v"])
def test_replicas_stages_and_a_mesh_together(name: str) -> None:
    """Eight workers."""
    place = bench("llama")
    plan = place.on_mesh(name, 2 if name != "zb-v" else 4, 2, 2, 2)
    assert plan.num_workers == 8
    held(place, plan)


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": "global:0.1"},
        {"clip": "previous:0.1"},
        {"ema": 0.9},
        {"precision": "fp16", "loss_scale": "dynamic:65536:2"},
        {"precision": "bf16"},
        {"recompute": ("all",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["gpt2", "mlp"])
def test_whatever_else_the_plan_says(model: str, fields: dict[str, Any]) -> None:
    place = bench(model)
    job = {k: fields[k] for k in fields if k != "recompute"}
    plan = replace(place.on_mesh("1f1b", 2, 2, 2), **job)
    if "precision" in fields:
        held_in(place, plan)
    else:
        held(place, replace(plan, **fields) if "recompute" in fields else plan)


def held_in(place: Bench, plan: Plan) -> None:
    """Planned anew, as the dtypes of what is exchanged are others."""
    from roundelay.planning.planning import plan as planned

    again = planned(
        place.job(), captured=place.captured, workers=2, tensor_parallel=2, micro_batches=2, rule="1f1b",
        cuts="roofline", precision=plan.precision, loss_scale=str(plan.loss_scale),
    )  # fmt: skip
    held(place, again)


def test_a_batch_with_fewer_rows_than_replicas_leaves_some_without_any() -> None:
    entry = ZOO["mlp"]
    full = entry.batches(0, 4)
    short = [tuple(part[:count] for part in batch) for batch, count in zip(full, (1, 3, 1, 4), strict=True)]
    place = Bench(entry, None, [tuple(part[:4] for part in full[0]), *short])  # type: ignore[arg-type]
    held(place, place.on_mesh("1f1b", 1, 2, 2, 2), steps=5)


@pytest.mark.parametrize("model", MODELS)
def test_a_mesh_changes_nothing_but_the_last_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout masks included. Llama and T5 compute their norms in float32."""
    if model not in ("llama", "t5"):
        monkeypatch.setattr(fidelity_on_mesh, "RELATIVE", {torch.float64: 1e-10})
    entry = ZOO[model]
    batches = [_double(batch) for batch in entry.batches(0, 3)]
    place = Bench(entry, entry.build(0).double(), batches)
    for parts in (2, 3):
        assert differs_on_mesh(place.captured, place.on_mesh("1f1b", 1, 1, parts), batches[0], 3) == ""


def trained(place: Bench, plan: Plan, optimizer: Callable[..., Any], steps: int) -> Trained:
    place.restore()
    session = Session(place.job(optimizer), place.captured, plan, 0, Length(steps=steps))
    return session.run(notify=lambda event: None)


def train_alike(place: Bench, one: Plan, several: Plan, optimizer: Callable[..., Any], steps: int = 10) -> None:
    """Of a model in double precision."""
    alone, on_mesh = (trained(place, plan, optimizer, steps) for plan in (one, several))
    for number, (loss, _) in alone.micro_losses.items():
        assert on_mesh.micro_losses[number][0] == pytest.approx(loss, rel=1e-10)
    for name, weight in alone.snapshot.parameters.items():
        torch.testing.assert_close(on_mesh.snapshot.parameters[name], weight, rtol=1e-8, atol=1e-8)


def send_what_is_planned(place: Bench, plan: Plan, steps: int) -> None:
    """Counted at the transport."""
    done = trained(place, plan, partial(SGD, lr=0.1), steps)
    channels = {channel.id: channel for channel in channels_of(read(plan))}
    for number, exchange in exchanges_of(read(plan), channels_of(read(plan))).items():
        times = steps * (plan.micro_batches if exchange.value else 1)
        holders = channels[number].sources
        for position, port in enumerate(holders):
            predicted = times * sum(exchange.bytes_sent(len(holders), position))
            assert done.workers[port.worker]["bytes_sent"][str(number)] == predicted, str(channels[number])


@pytest.mark.parametrize("model", ["gpt2", "bert_classifier", "skip"])
def test_ten_updates_are_those_without_a_mesh(model: str) -> None:
    entry = ZOO[model]
    batches = [_double(batch) for batch in entry.batches(0, 10)]
    place = Bench(entry, entry.build(0).double(), batches)
    optimizer = partial(AdamW, lr=1e-3)
    train_alike(place, place.plan(VARIANTS["1f1b"], 2, 2), place.on_mesh("1f1b", 2, 2, 2), optimizer)


def test_a_sum_that_is_counted_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    place = bench("gpt2")
    monkeypatch.setattr(local_graph._CountOnce, "backward", staticmethod(lambda ctx, grad: (grad, None)))
    found = differs_on_mesh(place.captured, place.on_mesh("1f1b", 1, 1, 2), place.batches[0], 3)
    assert found.startswith("the gradient of ")
    assert "of its size" in found


@pytest.mark.parametrize("way", [*WAYS, *EXCHANGE_WAYS])
@pytest.mark.parametrize("name", ["1f1b", "pipeoptim improved mixed"])
def test_tampering_with_one_holder_is_found(name: str, way: str) -> None:
    place = bench("dropout_heavy" if way == "rng" else "mlp")
    found = place.verify(place.on_mesh(name, 2, 2, 3), tamper=way)
    assert not found.equal


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_every_worker_sends_the_bytes_that_the_plan_says(transport: str) -> None:
    place, steps = bench("gpt2"), 3
    place = Bench(ZOO["gpt2"], None, ZOO["gpt2"].batches(0, steps))
    plan = place.on_mesh("1f1b", 1, 3, 2, 2, transport)
    send_what_is_planned(place, plan, steps)


def test_a_layer_of_gpt2_has_the_two_boxings_of_megatron_in_each_direction() -> None:
    place = bench("gpt2")
    plan = place.on_mesh("1f1b", 1, 1, 2)
    layers = place.model.config.n_layer  # type: ignore[union-attr]
    kinds = [exchange.kind for exchange in plan.exchanges]
    assert (kinds.count("boxed"), kinds.count("boxed-gradient")) == (2 * layers, 2 * layers)


def test_no_local_operation_is_a_distributed_tensor_s() -> None:
    place = bench("gpt2")
    captured = for_plan(place.captured, place.on_mesh("1f1b", 1, 1, 2))
    assert captured.sharding is not None
    for builder in captured.sharding.builders:
        for node in builder.exported.module.graph.nodes:
            assert "distributed" not in str(getattr(node.target, "__module__", ""))


# --- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, compile=True), "compile of the plan, with a mesh"),
        (lambda plan: replace(plan, backward="recompute"), "backward of the plan, with a mesh"),
        (lambda plan: replace(plan, clip=Clip.parse("stage:1")), "clip of the plan, with a mesh"),
        (lambda plan: replace(plan, mesh={"tensor": 2, "other": 1}), "one axis"),
        (lambda plan: replace(plan, mesh={"replicas": 2}), "none of which is called replicas"),
        (lambda plan: replace(plan, mesh={"tensor": 3}), "3 names, one for each place of the mesh"),
        (lambda plan: replace(plan, mesh={"tensor": 0}), "a number of workers from 1"),
        (lambda plan: replace(plan, parameters={"nobody": (("tensor", parse("S(0)")),)}), "no parameter of this name"),
        (
            lambda plan: replace(plan, parameters={"*": (("rows", parse("S(0)")),)}),
            "each at most once, of the mesh: tensor",
        ),
        (
            lambda plan: replace(plan, parameters={"*": (("tensor", parse("B")), ("tensor", parse("B")))}),
            "each at most once",
        ),
        (lambda plan: replace(plan, parameters={"*": (("tensor", parse("T(0)")),)}), "S(DIM)"),
        (
            lambda plan: replace(plan, parameters={"*": (("tensor", parse("S(3)")),)}),
            "a split of one of its dimensions",
        ),
        (lambda plan: replace(plan, exchanges=plan.exchanges[1:]), "exchanges[0] of the plan"),
    ],
)
def test_a_plan_whose_mesh_does_not_fit_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    place = bench("mlp")
    with pytest.raises(PlanError) as refused:
        place.verify(change(place.on_mesh("1f1b", 1, 2, 2)))
    assert message in str(refused.value)


def test_a_model_in_which_nothing_can_be_split_is_refused() -> None:
    place = bench("batchnorm")
    with pytest.raises(PlanError, match="--tensor-parallel 2: got a model without two matrix products"):
        place.on_mesh("1f1b", 1, 2, 2)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    place = bench("gpt2")
    plan = place.on_mesh("1f1b", 1, 2, 2)
    with pytest.raises(JobError, match=r"Adafactor.* of each a worker has a part"):
        place.verify(plan, place.job(lambda named: Adafactor(named, lr=1e-3)))


def test_the_check_against_plain_pytorch_runs_with_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    import roundelay

    place = bench("mlp")
    place.restore()
    found = roundelay.verify(place.job(), plan=place.on_mesh("1f1b", 2, 2, 2), steps=2)
    assert found.equal
    assert found.fidelity is not None
    assert found.fidelity.gradients
    monkeypatch.setattr(fidelity_on_mesh, "RELATIVE", {torch.float32: 0.0})
    place.restore()
    found = roundelay.verify(place.job(), plan=place.on_mesh("1f1b", 2, 2, 2), steps=2)
    assert not found.equal
    assert "on the mesh is not what it is without" in found.differences()
