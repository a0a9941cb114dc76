"""Results that a plan splits: the rows of a batch over a mesh, beside weights that are split otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import roundelay
from roundelay.errors import PlanError
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.plan import Lay, Plan
from roundelay.ir.sbp import parse
from roundelay.planning.planning import plan as planned
from roundelay.proof import fidelity_on_mesh
from roundelay.proof.fidelity_on_mesh import differs_on_mesh
from tests.equivalence.cells import DEADLINE_S, Bench
from tests.equivalence.test_mesh import held, send_what_is_planned, train_alike
from tests.zoo.entry import Entry

CLASSES, SIDE, ROWS = 7, 6, 10
HEAD = {"head.weight": (("devices", parse("S(0)")),)}
ROWS_SPLIT = {"backbone.*": (("devices", parse("S(0)")),)}


class Flat(nn.Module):
    """Names the size of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 4, -1).transpose(1, 2).reshape(x.shape[0], -1)


class Recogniser(nn.Module):
    """A backbone, and a head for so many classes, as in OneFlow's Fig. 11."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), Flat(), nn.Linear(4 * (SIDE - 2) ** 2, 5)
        )
        self.head = nn.Linear(5, CLASSES, bias=False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(images)), labels)


def drawn(seed: int, count: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 1, SIDE, SIDE, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))
        for _ in range(count)
    ]


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Recogniser()


ENTRY = Entry("recogniser", built, drawn, lambda loss, batch: loss, lambda batch: (batch, {}))


@cache
def place_of() -> Bench:
    return Bench(ENTRY, None, [*drawn(0, 3), *drawn(1, 1, 7)])


def split(
    place: Bench,
    parts: int = 2,
    parameters: Mapping[str, Lay] = HEAD,
    outputs: Mapping[str, Lay] = ROWS_SPLIT,
    **choices: Any,
) -> Plan:
    """A plan with these signatures, as it is read from a file."""
    options = {"workers": 1, "rule": "1f1b", "cuts": "roofline", "micro_batches": 2} | choices
    own = GivenSignatures({"devices": parts}, parameters, outputs)
    plan = planned(place.job(), captured=place.captured, signatures=own, deadline_s=DEADLINE_S, **options)
    return Plan.parse(plan.text())


def boxes(plan: Plan) -> list[tuple[str, str, str]]:
    return [(e.kind, e.value, ",".join(map(str, e.phases))) for e in plan.exchanges if e.value]


def test_features_are_gathered_and_classes_are_not() -> None:
    """The physical graph of OneFlow's Fig. 12."""
    scalar_or_row = ("reduce-scatter(0),all-gather(0)", "cross_entropy_loss")
    assert boxes(split(place_of())) == [
        ("boxed", "linear_box", "all-gather(1)"),
        ("boxed-gradient", "linear_box", "reduce-scatter(1)"),
        ("boxed", "cross_entropy_loss_amax_box", "reduce-scatter-max(0),all-gather(0)"),
        ("boxed", "cross_entropy_loss_sum_box", scalar_or_row[0]),
        ("boxed", "cross_entropy_loss_box", scalar_or_row[0]),
    ]


@pytest.mark.parametrize(
    ("rule", "workers", "parts"),
    [("1f1b", 1, 3), ("gpipe", 2, 2), ("pipedream", 2, 2), ("pipeoptim", 2, 3), ("zb-h1", 2, 2), ("cdp-v2", 2, 2)],
)
def test_every_rule_computes_what_its_reference_does(rule: str, workers: int, parts: int) -> None:
    held(place_of(), split(place_of(), parts, rule=rule, workers=workers))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_it_does_between_processes(transport: str) -> None:
    held(place_of(), split(place_of(), transport=transport))


def test_with_replicas_and_split_states() -> None:
    held(place_of(), split(place_of(), data_parallel=2, zero=1))


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_with_parts_of_other_sizes_and_with_none(rows: int) -> None:
    """Micro-batches have as many rows as there are parts, where the batch has so many; else some parts have none."""
    batches = [*drawn(0, 1), *drawn(1, 3, rows)]
    place = Bench(ENTRY, None, batches)
    held(place, split(place, 3), steps=4)


@pytest.mark.parametrize("parameters", [{}, HEAD], ids=["rows alone", "rows and classes"])
@pytest.mark.parametrize("parts", [2, 3])
def test_it_changes_nothing_but_the_last_bits(
    parts: int, parameters: Mapping[str, Lay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity_on_mesh, "RELATIVE", {torch.float64: 1e-10})
    place = in_double(1)
    plan = split(place, parts, parameters)
    assert plan.outputs == ROWS_SPLIT
    assert differs_on_mesh(place.captured, plan, place.batches[0], 3) == ""


def in_double(count: int) -> Bench:
    batches = [(images.double(), labels) for images, labels in drawn(0, count)]
    return Bench(ENTRY, built(0).double(), batches)


def test_ten_updates_are_those_without_a_mesh() -> None:
    place = in_double(10)
    optimizer = partial(AdamW, lr=1e-3)
    train_alike(place, split(place, 1, outputs={}, parameters={}), split(place, 3), optimizer)


def test_every_worker_sends_the_bytes_that_the_plan_says() -> None:
    steps = 2
    place = Bench(ENTRY, None, drawn(0, steps))
    send_what_is_planned(place, split(place, micro_batches=1), steps)


def test_a_stage_that_begins_with_a_boxing_is_compared_with_plain_pytorch_too() -> None:
    place = place_of()
    plan = split(place, workers=2, cuts="linear")
    assert [stage.segments[:1] for stage in plan.stages] == [("linear",), ("linear_box",)]
    place.restore()
    found = roundelay.verify(place.job(), plan=plan, steps=2)
    assert found.equal, found.differences()
    assert found.fidelity is not None
    assert found.fidelity.gradients


def test_the_longest_pattern_wins() -> None:
    """The features are computed whole, of what is gathered before."""
    plan = split(place_of(), outputs=ROWS_SPLIT | {"backbone.4": (("devices", parse("B")),)})
    assert boxes(plan)[0] == ("boxed", "reshape_box", "all-gather(1)")
    held(place_of(), plan)


def test_a_pattern_gives_what_it_can() -> None:
    """The loss cannot be split by rows, as it has none; and a mean of what is split is that of all."""
    plan = split(place_of(), parameters={}, outputs={"*": (("devices", parse("S(0)")),)})
    assert boxes(plan)[0][1:] == ("linear_1_box", "all-gather(1)")
    held(place_of(), plan)


class Halved(Recogniser):
    """With one of an operation's several results."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        first, second = self.head(self.backbone(images)).double().split([3, CLASSES - 3], 1)
        return F.cross_entropy(torch.cat([second, first], 1), labels)


def test_one_of_several_results_has_no_signature_of_its_own() -> None:
    torch.manual_seed(0)
    place = Bench(ENTRY, Halved(), drawn(0, 3))
    with pytest.raises(PlanError, match=r"'getitem': got S\(0\) for one of an operation's several results"):
        split(place, outputs={"getitem": (("devices", parse("S(0)")),)})
    held(place, split(place, outputs={"*": (("devices", parse("S(0)")),)}), steps=3)


class Largest(Recogniser):
    """With a gradient that flows through the largest score, which one worker has."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.backbone(images))
        return (scores.amax(1) - scores.mean(1)).square().mean()


def test_a_maximum_that_has_a_gradient_is_taken_of_all() -> None:
    torch.manual_seed(0)
    place = Bench(ENTRY, Largest(), drawn(0, 3))
    plan = split(place)
    assert not [e for e in plan.exchanges if "max" in "".join(map(str, e.phases))]
    assert differs_on_mesh(place.captured, plan, place.batches[0], 3) == ""
    held(place, plan, steps=3)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"nobody": (("devices", parse("S(0)")),)}, "no module or operation of this name"),
        ({"head": (("devices", parse("S(1)")),)}, "result of operation 'linear_1': got S(1); expected one that it can"),
        ({"backbone": (("rows", parse("S(0)")),)}, "each at most once, of the mesh: devices"),
        (
            {"backbone": (("devices", parse("S(4)")),)},
            "result of operation 'linear': got S(4); expected one that it can",
        ),
        (
            {"backbone.1": (("devices", parse("S(1)")),)},
            "result of operation 'group_norm': got S(1); expected one that it",
        ),
    ],
)
def test_what_no_result_can_have_is_refused(outputs: Mapping[str, Lay], message: str) -> None:
    with pytest.raises(PlanError) as refused:
        split(place_of(), 8, outputs=outputs, parameters={})
    assert message in str(refused.value)


class Varied(Recogniser):
    """With dropout, places of rows, and a maximum over them: of what varies with the batch."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(self.backbone(images), 0.5)
        q = x.unsqueeze(1)
        x = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).squeeze(1)
        order = labels.argsort()
        x = x[order] - x.detach().amax(0) + F.embedding(order, x)
        return F.cross_entropy(self.head(x), labels)


class Looked(Recogniser):
    """The same without dropout, so that rows are looked up, and a maximum taken, of parts."""

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, order = self.backbone(images), labels.argsort()
        return F.cross_entropy(self.head(x[order] + F.embedding(order, x) - x.detach().amax(0)), labels)


@pytest.mark.parametrize("model", [Varied, Looked])
@pytest.mark.parametrize("pattern", ["*", "backbone.*"])
def test_what_needs_the_whole_of_what_varies_gathers_it(pattern: str, model: type[Recogniser]) -> None:
    torch.manual_seed(0)
    place = Bench(ENTRY, model(), [*drawn(0, 2), *drawn(1, 1, 2), *drawn(2, 1, 1)])
    plan = split(place, 3, outputs={pattern: (("devices", parse("S(0)")),)})
    assert differs_on_mesh(place.captured, plan, place.batches[0], 3) == ""
    held(place, plan, steps=4)


class WideAndDeep(nn.Module):
    """A table of features, and layers over what is found in it (OneFlow, Sect. 6.3.2)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 6)
        self.deep = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: Tensor, clicked: Tensor) -> Tensor:
        scores = self.deep(self.table(features).sum(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked)


def clicks(seed: int, count: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(23, (rows, 3), generator=generator), torch.rand(rows, generator=generator).round())
        for _ in range(count)
    ]


def wide_and_deep(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return WideAndDeep()


TABLED = Entry("wide_and_deep", wide_and_deep, clicks, lambda loss, batch: loss, lambda batch: (batch, {}))
DEEP_BY_ROWS = {"deep.*": (("devices", parse("S(0)")),)}


@pytest.mark.parametrize(
    ("signature", "phases"),
    [("S(0)", ["reduce-scatter(1)", "all-gather(1)"]), ("S(1)", ["all-to-all(3>1)", "all-to-all(1>3)"])],
)
@pytest.mark.parametrize(("transport", "parts"), [("memory", 3), ("shm", 2), ("gloo", 2)])
def test_what_a_split_table_gives_goes_to_rows(signature: str, phases: list[str], transport: str, parts: int) -> None:
    """Found in rows of the table: added up by those who get it. Found in columns: each worker sends its own."""
    place = Bench(TABLED, None, [*clicks(0, 2), *clicks(1, 1, 7)])
    table = {"table.weight": (("devices", signature),)}
    plan = split(place, parts, table, DEEP_BY_ROWS, transport=transport)
    assert [",".join(map(str, e.phases)) for e in plan.exchanges if e.value == "sum_1_box"] == phases
    held(place, plan, steps=3)
    assert differs_on_mesh(place.captured, plan, place.batches[0], 3) == ""


@pytest.mark.parametrize("rule", ["pipedream", "pipeoptim"])
def test_splits_become_others_under_every_rule(rule: str) -> None:
    place = Bench(TABLED, None, clicks(0, 4))
    plan = split(place, 2, {"table.weight": (("devices", parse("S(1)")),)}, DEEP_BY_ROWS, rule=rule, workers=2)
    held(place, plan)
