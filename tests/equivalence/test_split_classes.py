"""A vocabulary that is split over a mesh: tables by rows, scores by classes, the softmax by its maximum and its sum."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from math import prod

import pytest
import torch
from torch.optim import AdamW

from roundelay.ir.plan import Plan
from roundelay.ir.sbp import parse
from roundelay.lower import megatron
from roundelay.planning.planning import plan as planned
from roundelay.proof import fidelity_on_mesh
from roundelay.proof.fidelity_on_mesh import differs_on_mesh
from roundelay.proof.tamper_ways import EXCHANGE_WAYS
from roundelay.runtime import collectives
from tests.equivalence.cells import VARIANTS, Bench
from tests.equivalence.test_mesh import BY_RULE, held, send_what_is_planned, train_alike
from tests.equivalence.test_replicas import _double
from tests.zoo import ZOO

MODELS = ("gpt2", "llama", "t5")
"""Those that compute their own loss; gpt2 and t5 have one table for the tokens and their scores."""


@pytest.fixture(autouse=True)
def few_classes_are_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(megatron, "LEAST_CLASSES", 2)
    return iter([None])


@cache
def place_of(model: str) -> Bench:
    return Bench(ZOO[model])


def tables_of(place: Bench) -> list[str]:
    """The names of the parameters with a row for each word."""
    words = place.model.config.vocab_size  # type: ignore[union-attr]
    return [name for name, parameter in place.captured.graph.parameters.items() if parameter.shape[0] == words]


@pytest.mark.parametrize("model", MODELS)
def test_tables_are_split_by_rows_and_scores_never_move(model: str) -> None:
    place = place_of(model)
    plan = place.on_mesh("1f1b", 1, 1, 2)
    assert len(tables_of(place)) == (2 if model == "llama" else 1)
    for name in tables_of(place):
        assert plan.parameters[name] == (("tensor", parse("S(0)")),)
    of_loss = [e for e in plan.exchanges if e.value.startswith("cross_entropy_loss")]
    assert [e.kind for e in of_loss] == ["boxed"] * 3
    assert [str(e.phases[0]) for e in of_loss] == ["reduce-scatter-max(0)", "reduce-scatter(0)", "reduce-scatter(0)"]
    labels = prod(of_loss[0].shapes[0])
    assert [prod(e.shapes[0]) for e in of_loss] == [labels, labels, 1]
    values = place.captured.graph.values
    words = next(iter(place.captured.graph.inputs))
    assert labels <= prod(values[words].shape)


def test_a_loss_outside_of_the_model_leaves_its_classes_whole() -> None:
    plan = Bench(ZOO["tied_head"]).on_mesh("1f1b", 1, 1, 2)
    assert not [e for e in plan.exchanges if "max" in "".join(map(str, e.phases))]


@pytest.mark.parametrize("rule", ["gpipe", "pipedream", "pipedream-2bw", "pipeoptim", "spectrain", "zb-h1", "cdp-v2"])
def test_every_rule_computes_what_its_reference_does(rule: str) -> None:
    place = place_of(MODELS[len(rule) % 3])
    held(place, place.on_mesh(BY_RULE[rule], 2, 2, 2 + len(rule) % 2))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_it_does_between_processes(transport: str) -> None:
    place = place_of("gpt2")
    held(place, place.on_mesh("1f1b", 1, 2, 2, transport=transport))


@pytest.mark.parametrize("model", MODELS)
def test_with_replicas_and_split_states(model: str) -> None:
    place = place_of(model)
    plan = planned(
        place.job(partial(AdamW, lr=1e-3)),
        captured=place.captured,
        workers=1,
        data_parallel=2,
        tensor_parallel=2,
        zero=1,
        rule="1f1b",
        cuts="roofline",
        deadline_s=60,
    )
    held(place, Plan.parse(plan.text()))


@pytest.mark.parametrize("model", [*MODELS, "bert_classifier"])
def test_it_changes_nothing_but_the_last_bits(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others compute their loss in float32."""
    if model == "bert_classifier":
        monkeypatch.setattr(fidelity_on_mesh, "RELATIVE", {torch.float64: 1e-10})
    entry = ZOO[model]
    batches = [_double(batch) for batch in entry.batches(0, 3)]
    place = Bench(entry, entry.build(0).double(), batches)
    for parts in (2, 3):
        assert differs_on_mesh(place.captured, place.on_mesh("1f1b", 1, 1, parts), batches[0], 3) == ""


def test_ten_updates_are_those_without_a_mesh() -> None:
    entry = ZOO["bert_classifier"]
    batches = [_double(batch) for batch in entry.batches(0, 10)]
    place = Bench(entry, entry.build(0).double(), batches)
    optimizer = partial(AdamW, lr=1e-3)
    split = place.on_mesh("1f1b", 2, 2, 2)
    assert [e for e in split.exchanges if "max" in "".join(map(str, e.phases))]
    train_alike(place, place.plan(VARIANTS["1f1b"], 2, 2), split, optimizer)


def test_every_worker_sends_the_bytes_that_the_plan_says() -> None:
    steps = 2
    place = Bench(ZOO["gpt2"], None, ZOO["gpt2"].batches(0, steps))
    send_what_is_planned(place, place.on_mesh("1f1b", 1, 3, 2), steps)


@pytest.mark.parametrize("way", EXCHANGE_WAYS)
def test_tampering_with_one_holder_is_found(way: str) -> None:
    place = place_of("llama")
    assert not place.verify(place.on_mesh("1f1b", 1, 2, 3), tamper=way).equal


def test_a_sum_in_place_of_the_maximum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are the same but for rounding, as no result depends on the shift: only the bits tell."""
    place = place_of("llama")
    monkeypatch.setitem(collectives._REDUCED, "max", collectives._sum)  # type: ignore[arg-type]
    assert not place.verify(place.on_mesh("1f1b", 1, 2, 2)).equal


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_in_lower_precision(model: str, precision: str) -> None:
    place = place_of(model)
    plan = planned(
        place.job(),
        captured=place.captured,
        workers=1,
        tensor_parallel=2,
        micro_batches=2,
        rule="1f1b",
        cuts="roofline",
        precision=precision,
        deadline_s=60,
    )
    assert differs_on_mesh(place.captured, plan, place.batches[0], 3) == ""
    held(place, plan)


def test_a_stage_before_the_last_has_the_table_s_rows_too() -> None:
    """GPT-2's table is read by the first stage and by the last, each worker has its own rows in both."""
    place = place_of("gpt2")
    held(place, place.on_mesh("pipedream", 2, 2, 2))
