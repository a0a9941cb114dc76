"""The reference's versions against the schedules, and its training against numbers worked out by hand.

Two kinds of stages: ``Counting``, whose weights spell the version that they are, and ``Times``, the product w x, whose
training fits on paper. (``reference/`` below holds predictions, and captured models against plain PyTorch.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from roundelay.errors import InternalError, PlanError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.micro_batch import stream as headers
from roundelay.ir.rule import Mode, rule_named
from roundelay.reference import ReferenceResult, ReferenceStage, Setting, run_reference
from roundelay.reference.run_inputs import Named
from roundelay.schedules import SCHEDULES, actions

Stream = Iterable[tuple[MicroBatch, dict[str, Any]]]
LINES = sorted(name for name, schedule in SCHEDULES.items() if schedule.stages_per_worker == 1 and name != "free")
"""Schedules with an order of their own, under which every worker has one stage."""


@dataclass
class Counting:
    """W is minus its version under SGD with lr 1: every batch's gradient is 1, whatever the weights."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    seen: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Counting, ...]:
        return (self,)

    def forward(
        self, params: Any, buffers: Any, inputs: Any, draw: int, *, mode: Mode, measure: bool = False
    ) -> tuple[dict[str, Tensor], int]:
        self.seen["F", draw] = round(-params[self.name].item())
        return {self.outputs[0]: torch.zeros((), dtype=torch.float64)}, draw

    def backward(self, tape: int, grad_outputs: Any, params: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.seen["B", tape] = round(-params[self.name].item())
        gradient = grad_outputs[self.outputs[0]]
        return {name: gradient for name in self.inputs if name != "input.0"}, {self.name: gradient}


@dataclass
class Times(Counting):
    """w x; ``stash`` has the forward's w, the other modes read the backward's."""

    def forward(self, params: Any, buffers: Any, inputs: Any, draw: int, *, mode: Mode, measure: bool = False) -> Any:
        x, w = inputs[self.inputs[0]], params[self.name]
        return {self.outputs[0]: x * w}, (x, w.clone() if mode == "stash" else None)

    def backward(self, tape: Any, grad_outputs: Any, params: Any) -> Any:
        (x, w), gradient = tape, grad_outputs[self.outputs[0]]
        down = gradient * (params[self.name] if w is None else w)
        return {name: down for name in self.inputs if name != "input.0"}, {self.name: gradient * x}


def chained(kind: type[Counting], depth: int) -> list[Any]:
    """Stages 0 to depth - 1 of one scalar weight each, named w0, w1, ..."""
    values = ["input.0", *(f"h{k}" for k in range(1, depth)), "loss"]
    return [kind(f"w{k}", (values[k],), (values[k + 1],)) for k in range(depth)]


def scalars(depth: int, value: float) -> Named:
    return [(f"w{k}", nn.Parameter(torch.tensor(value, dtype=torch.float64))) for k in range(depth)]


def ones(made: Iterable[MicroBatch]) -> Stream:
    """A stream in which x is 1."""
    return [(header, {"input.0": torch.tensor(1.0, dtype=torch.float64)}) for header in made]


def trained(
    functions: list[Any], named: Named, stream: Stream, rule: str, *, mode: Mode = "stash", **options: Any
) -> ReferenceResult:
    """A run over stages of scalars."""
    stages = [ReferenceStage([f], (f"w{k}",), ()) for k, f in enumerate(functions)]
    setting = Setting(rule_named(rule), options.pop("predictor", "none"), mode)
    optimizer = options.pop("optimizer", lambda params: SGD(params, lr=1.0))
    scheduler = options.pop("scheduler", None)
    dealt = [(one,) for one in stream]
    return run_reference(setting, stages, named, [{}], dealt, optimizer, scheduler, lambda g: g, **options)


def read(rule: str, counts: list[int], depth: int, *, what: str = "F", **options: Any) -> list[list[int]]:
    """Per stage, the version that each micro-batch's forward (or backward) read."""
    functions = chained(Counting, depth)
    made = options.pop("made", headers(counts))
    trained(functions, scalars(depth, -float(made[0].batch)), ones(made), rule, **options)
    return [[f.seen[what, header.g] for header in made] for f in functions]


# Versions.


def test_pipedream_reads_the_versions_of_the_paper() -> None:
    expected = [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert read("pipedream", [1] * 6, 3) == expected
    assert read("pipedream", [1] * 6, 3, what="B") == expected


def test_a_short_batch_moves_the_versions_behind_it() -> None:
    assert read("pipedream", [2, 1, 2, 2], 3) == [[0, 0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 2, 2, 3], [0, 0, 1, 2, 2, 3, 3]]


def test_after_a_drain_the_versions_warm_up_again() -> None:
    made = headers([2, 2], start_g=5, start_batch=3)
    assert read("pipedream", [], 3, made=made) == [[3, 3, 3, 3], [3, 3, 3, 4], [3, 3, 4, 4]]


@pytest.mark.parametrize("rule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("what", ["F", "B"])
def test_a_flushing_rule_reads_the_batchs_own_version(rule: str, what: str) -> None:
    assert read(rule, [2, 3, 1], 3, what=what) == [[0, 0, 1, 1, 1, 2]] * 3


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4), st.sampled_from(LINES))
def test_a_forward_reads_what_the_schedule_has_updated_before_it(counts: list[int], depth: int, schedule: str) -> None:
    rule = {"async-1f1b": "pipedream"}.get(schedule, schedule)
    for k, versions in enumerate(read(rule, counts, depth)):
        order = actions(SCHEDULES[schedule], [k], depth, counts)
        updates = list(accumulate(action.kind == "U" for action in order))
        expected = {action.number: done for action, done in zip(order, updates, strict=True) if action.kind == "F"}
        assert versions == [expected[g] for g in range(sum(counts))]


@pytest.mark.parametrize(("mode", "number"), [("stash", 0), ("recompute", 1), ("mixed", 1)])
def test_pipeoptims_backward_reads_live_weights_unless_it_stashes(mode: Mode, number: int) -> None:
    versions = read("pipeoptim", [1] * 5, 3, what="B", mode=mode, predictor="improved")
    assert versions[0] == ([0, 0, 0, 1, 2], [0, 1, 2, 3, 4])[number]


@pytest.mark.parametrize(
    ("predictor", "expected"),
    [  # W[U] of plain SGD, moved on by s displacements; U = 0, 0, 0, 0, 1, 2, 2 at stage 0
        ("paper", [[0, 0, 0, 0, 3, 4, 4], [0, 0, 0, 2, 3, 3, 4], [0, 0, 1, 2, 2, 3, 3]]),
        ("released-code", [[0, 0, 0, 0, 4, 5, 5], [0, 0, 0, 3, 4, 4, 5], [0, 0, 2, 3, 3, 4, 4]]),
        ("improved", [[0, 0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 2, 2, 3], [0, 0, 1, 2, 2, 3, 3]]),
    ],
)
def test_each_setting_bridges_its_own_distance(predictor: str, expected: list[list[int]]) -> None:
    assert read("pipeoptim", [2, 1, 2, 2], 3, mode="recompute", predictor=predictor) == expected


def test_improved_bridges_the_updates_really_crossed() -> None:
    """RMSprop with alpha 0 steps by the gradient's sign, and is predicted by its last displacement."""
    versions = read(
        "pipeoptim", [2, 1, 2, 2], 3, mode="recompute", predictor="improved",
        optimizer=lambda params: RMSprop(params, lr=1.0, alpha=0.0, eps=0.0),
    )  # fmt: skip
    assert versions == [[0, 0, 0, 0, 2, 3, 3], [0, 0, 0, 2, 2, 3, 3], [0, 0, 1, 2, 2, 3, 3]]


# Training on paper.


def test_pipedreams_first_updates_are_those_worked_out_by_hand() -> None:
    """D = 2, w0 = w1 = 1, lr 1/2: g = 1 reads w0 = 1 and w1 = 1/2, g = 2 reads w0 = 1/2 and w1 = 0."""
    weights: list[tuple[int, float]] = []
    result = trained(
        chained(Times, 2), scalars(2, 1.0), ones(headers([1, 1, 1])), "pipedream",
        optimizer=lambda params: SGD(params, lr=0.5),
        audit=lambda kind, k, r, _, tensors: weights.append((k, tensors[f"w{k}"].item())) if kind == "update" else None,
    )  # fmt: skip
    assert weights == [(1, 0.5), (0, 0.5), (1, 0.0), (0, 0.25), (1, -0.25), (0, 0.25)]
    assert result.losses == {0: 1.0, 1: 0.5, 2: 0.0}
    assert result.updates == 3


@pytest.mark.parametrize(("mode", "expected"), [("stash", 0.25), ("recompute", 0.375), ("mixed", 0.375)])
def test_the_backward_goes_through_the_weights_of_its_mode(mode: Mode, expected: float) -> None:
    """D = 3, all w 1, lr 1/2: at g = 1 stage 1 forwards with w1 = 1 and w2 = 1/2; its live w1 is 1/2."""
    result = trained(
        chained(Times, 3), scalars(3, 1.0), ones(headers([1, 1])), "pipeoptim", mode=mode, predictor="improved",
        optimizer=lambda params: SGD(params, lr=0.5),
    )  # fmt: skip
    assert [result.parameters[f"w{k}"].item() for k in range(3)] == [expected, 0.25, 0.0]


def test_prediction_looks_its_rates_up_in_the_schedule_ahead() -> None:
    """D = 3, g = 3 reads U = 1 at stage 0, s = 2: b = lr(1) mu + lr(2) mu^2 = .5 * .5 + .25 * .25."""
    functions, seen = chained(Counting, 3), []
    functions[0].forward = _recording(functions[0], seen)
    trained(
        functions, scalars(3, 0.0), ones(headers([1] * 4)), "pipeoptim", mode="recompute", predictor="improved",
        optimizer=lambda params: SGD(params, lr=1.0, momentum=0.5), scheduler=lambda opt: StepLR(opt, 1, 0.5),
    )  # fmt: skip
    assert seen == [0.0, 0.0, 0.0, -1.0 - 0.3125]


def test_the_look_ahead_stays_within_the_schedules_length() -> None:
    result = trained(
        chained(Counting, 3), scalars(3, 0.0), ones(headers([1] * 6)), "pipeoptim", mode="recompute",
        predictor="improved", optimizer=lambda params: SGD(params, lr=1.0, momentum=0.5),
        scheduler=lambda opt: OneCycleLR(opt, 1.0, total_steps=6),
    )  # fmt: skip
    assert result.updates == 6


@pytest.mark.parametrize(("learns", "expected"), [(True, [1.0, 1.0, -0.25]), (False, [1.0, 1.0, 1.0])])
def test_decay_is_predicted_only_where_an_update_has_applied_it(learns: bool, expected: list[float]) -> None:
    """Plain SGD, decay 1/2, lr 1: W[1] = 1 - 1/2 - 1, predicted to be halved; without a gradient nothing moves."""
    functions, seen = chained(Counting, 2), []
    functions[0].forward = _recording(functions[0], seen)
    if not learns:
        functions[0].backward = lambda *_: ({}, {})
    trained(
        functions, scalars(2, 1.0), ones(headers([1] * 3)), "pipeoptim", mode="recompute", predictor="improved",
        optimizer=lambda params: SGD(params, lr=1.0, weight_decay=0.5),
    )  # fmt: skip
    assert seen == expected


def _recording(functions: Counting, seen: list[float]) -> Callable[..., Any]:
    forward = functions.forward

    def recorded(params: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(params[functions.name].item())
        return forward(params, *args, **kwargs)

    return recorded


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    made: list[SGD] = []

    def optimizer(params: Named) -> SGD:
        made.append(SGD(params, lr=0.5, momentum=0.9))
        return made[-1]

    def run(named: Named, part: list[MicroBatch], start: Any = None) -> ReferenceResult:
        options = {"optimizer": optimizer, "start": start}

        def falling(opt: torch.optim.Optimizer) -> LambdaLR:
            return LambdaLR(opt, lambda t: 1 / (t + 1))

        return trained(chained(Times, 2), named, ones(part), "gpipe", scheduler=falling, **options)

    whole, resumed, all_headers = scalars(2, 0.75), scalars(2, 0.75), headers([2, 1, 2, 2])
    expected = run(whole, all_headers)
    made.clear()
    run(resumed, all_headers[:3])
    saved = copy.deepcopy(made[0].state_dict())
    got = run(resumed, all_headers[3:], lambda optimizer: optimizer.load_state_dict(copy.deepcopy(saved)))
    assert (got.parameters, got.optimizer_state, got.updates) == (expected.parameters, expected.optimizer_state, 4)


def test_the_audit_hears_everything_in_causal_order() -> None:
    heard: list[tuple[str, int, int, list[str]]] = []
    trained(
        chained(Times, 2), scalars(2, 1.0), ones(headers([1], start_g=7, start_batch=4)), "gpipe",
        audit=lambda kind, k, r, number, tensors: heard.append((kind, k, number, list(tensors))),
    )  # fmt: skip
    assert heard == [
        ("forward", 0, 7, ["h1"]), ("forward", 1, 7, ["loss"]),
        ("backward", 1, 7, ["d h1", "w1"]), ("backward", 0, 7, ["w0"]),
        ("update", 1, 4, ["w1"]), ("update", 0, 4, ["w0"]),
    ]  # fmt: skip


def test_a_gradient_that_no_stage_takes_is_an_error() -> None:
    functions = chained(Times, 2)
    functions[0].inputs = ("batch.x",)
    stream = [(header, {**values, "batch.x": values["input.0"]}) for header, values in ones(headers([1]))]
    with pytest.raises(InternalError, match=r"gradients of batch\.x that no stage took"):
        trained(functions, scalars(2, 1.0), stream, "gpipe")


def test_a_batch_that_never_ends_is_an_error() -> None:
    made = headers([2, 1])
    with pytest.raises(InternalError, match="got batch 1; expected batch 0"):
        trained(chained(Times, 1), scalars(1, 1.0), ones([made[0], made[2]]), "gpipe")


def test_an_unknown_predictor_is_refused() -> None:
    with pytest.raises(PlanError, match="expected one of improved, paper, released-code"):
        read("pipeoptim", [1], 2, mode="recompute", predictor="none")
