"""What comes along an edge is what the plan has come, or ends the run by its sender's name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import RoundelayError, UnfitMessageError
from roundelay.frontend import capture
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.stage import Edge
from roundelay.ir.value_layout import ValueLayout
from roundelay.runtime.due_values import DueForwards, DueGradients, check_number
from roundelay.runtime.workload import Wrap
from roundelay.transport.endpoint import Endpoint, Message, Value
from tests.equivalence.cells import VARIANTS, bench
from tests.frontend.cutting import backwards, buffers_of, captured_of, even_cuts, forwards, weights_of
from tests.zoo import ZOO, rows

EDGE = Edge(0, 1, ("a", "n", "w"), ("a", "w"))
LAYOUTS = (
    ValueLayout("tensor", "float32", (-2, 3, None)),
    ValueLayout("number", "", ()),
    ValueLayout("tensor", "", (5,)),
)
HEADER = MicroBatch(4, 0, 0, 1, 4, 4, 0, 0, 0)
GOOD: tuple[Value, ...] = (torch.zeros(8, 3, 7), 3, torch.zeros(5))
WRONG: dict[str, Any] = {
    "other rows": (torch.zeros(6, 3, 7), *GOOD[1:]),
    "another size": (torch.zeros(8, 2, 7), *GOOD[1:]),
    "another dtype": (torch.zeros(8, 3, 7, dtype=torch.float64), *GOOD[1:]),
    "fewer dimensions": (torch.zeros(8, 3), *GOOD[1:]),
    "a number for a tensor": (1.0, *GOOD[1:]),
    "nothing for a tensor": (None, *GOOD[1:]),
    "a tensor for a number": (GOOD[0], torch.zeros(()), GOOD[2]),
    "nothing for a number": (GOOD[0], None, GOOD[2]),
    "fewer values": GOOD[:2],
    "more values": (*GOOD, 1),
    "no values": (),
}
HEADERS = {
    "more rows than the batch": {"rows": 9},
    "an empty batch": {"batch_rows": 0, "rows": 0},
    "a part beyond the last": {"index": 1},
    "a batch before the first": {"batch": -1},
    "a scale beyond all numbers": {"scale_log2": 2**40},
    "a replica beyond the last": {"replica": 3},
}


def forward(values: tuple[Value, ...], header: MicroBatch = HEADER) -> Message:
    return Message(0, header.numbers(), values)


def test_values_that_are_due_are_taken_in_any_size_that_may_vary() -> None:
    due = DueForwards(EDGE, LAYOUTS)
    for count, size in ((4, 7), (4, 7), (4, 1), (2, 9), (1, 0)):
        header = HEADER._replace(rows=count)
        due.check(forward((torch.zeros(2 * count, 3, size), 2.0, torch.zeros(5, dtype=torch.int8)), header))
    due.check(forward((), HEADER._replace(rows=0)))


def test_what_was_taken_for_some_rows_is_not_taken_for_others() -> None:
    due, fewer = DueForwards(EDGE, LAYOUTS), (torch.zeros(4, 3, 7), *GOOD[1:])
    due.check(forward(GOOD))
    due.check(forward(fewer, HEADER._replace(rows=2)))
    for values, count in ((GOOD, 2), (fewer, 4)):
        with pytest.raises(ValueError, match="is due"):
            due.check(forward(values, HEADER._replace(rows=count)))


@pytest.mark.parametrize("what", WRONG)
def test_values_that_are_not_due_are_refused_first_and_after_good_ones(what: str) -> None:
    due = DueForwards(EDGE, LAYOUTS)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"due|where"):
            due.check(forward(WRONG[what]))
        due.check(forward(GOOD))
    with pytest.raises(ValueError, match="due"):
        due.check(forward(GOOD, HEADER._replace(rows=0)))


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_no_micro_batch_has_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="MicroBatch"):
        DueForwards(EDGE, LAYOUTS).check(forward(GOOD, HEADER._replace(**HEADERS[what])))


@pytest.mark.parametrize("values", [(0.0, GOOD[0], GOOD[2]), (None, None, None), (2, None, GOOD[2])])
def test_gradients_are_like_what_was_sent(values: tuple[Value, ...]) -> None:
    due = DueGradients(EDGE)
    due.note(forward(GOOD))
    due.check(forward(values))
    with pytest.raises(ValueError, match="for which none are due"):
        due.check(forward(values))
    due.note(forward(()))
    due.check(forward(()))


@pytest.mark.parametrize(
    "values",
    [
        (0.0, torch.zeros(4, 3, 7), None),
        (0.0, torch.zeros(8, 3, 7, dtype=torch.bfloat16), None),
        (0.0, 1, None),
        (0.0, GOOD[0]),
        (0.0, GOOD[2], GOOD[0]),
        (torch.zeros(2), GOOD[0], None),
        (),
    ],
)
def test_gradients_of_another_form_are_refused(values: tuple[Value, ...]) -> None:
    due = DueGradients(EDGE)
    due.note(forward(GOOD))
    with pytest.raises(ValueError, match=r"due|where"):
        due.check(forward(values))


def test_a_norm_is_a_number() -> None:
    for good in ((0.0,), (None,), (3,)):
        check_number(Message(0, (), good))
    for bad in ((), (torch.zeros(2),)):
        with pytest.raises(ValueError, match="a number is due"):
            check_number(Message(0, (), bad))


VALUES = st.none() | st.integers(-9, 9) | st.floats() | st.sampled_from([*GOOD, *WRONG["other rows"]])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=16), st.lists(VALUES, max_size=5).map(tuple))
def test_any_message_is_taken_or_refused(header: list[int], values: tuple[Value, ...]) -> None:
    due, back = DueForwards(EDGE, LAYOUTS), DueGradients(EDGE)
    back.note(forward(GOOD))
    for check in (due.check, back.check, check_number):
        with suppress(ValueError, TypeError, LookupError):
            check(Message(0, tuple(header), values))


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_models_send_is_what_is_due(name: str, precision: str) -> None:
    try:
        captured = captured_of(name).lowering(precision)
    except RoundelayError:
        pytest.skip("this model cannot be computed in it")
    cut, known = even_cuts(captured, 3), 0
    for count in (4, 3, 2):
        batch = rows(ZOO[name].batches(5, 1)[0], 0, count)
        try:
            values = dict(captured.values(batch))
        except RoundelayError:
            continue
        made = forwards(captured, cut, batch, weights_of(captured), buffers_of(captured))
        values |= {n: value for one in made for n, value in one.outputs.items()}
        _, entering, leaving = backwards(made, weights_of(captured))
        header = HEADER._replace(rows=count)
        for edge in cut.edges:
            layouts = [captured.layout(n) for n in edge.values]
            known += sum(size is not None for layout in layouts if layout for size in layout.sizes)
            message = forward(tuple([sent(values[n]) for n in edge.values]), header)
            DueForwards(edge, [layout for layout in layouts if layout is not None]).check(message)
            back = DueGradients(edge)
            back.note(message)
            grads = {**entering[edge.source], **leaving[edge.target]}
            back.check(forward((0.0, *[grads.get(n) for n in edge.gradients]), header))
    assert known


def sent(value: Any) -> Value:
    return value.contiguous() if isinstance(value, torch.Tensor) else value  # type: ignore[no-any-return]


def test_a_size_that_varies_by_itself_is_not_fixed_by_the_sample() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    batch = (torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4))
    captured = capture(
        model, lambda out, batch: (out.mean((1, 2)) - batch[1]).square().mean(), batch, lambda b: ((b[0],), {})
    )
    assert captured.layout(captured.graph.ops[1].name) == ValueLayout("tensor", "float32", (-1, None, 4))


# --- in a run

BREAKS: dict[str, Callable[[Message], Message]] = {
    "shape": lambda m: m._replace(values=tuple([v[:-1] if isinstance(v, torch.Tensor) else v for v in m.values])),
    "dtype": lambda m: m._replace(values=tuple([v.double() if isinstance(v, torch.Tensor) else v for v in m.values])),
    "count": lambda m: m._replace(values=m.values[:-1]),
    "header": lambda m: m._replace(header=(m.header[0], -1, *m.header[2:])),
}


def breaking(worker: int, what: str) -> Wrap:
    """One worker's third message to another, and those after it, are others than the plan's."""

    def wrap(endpoint: Endpoint) -> Endpoint:
        if endpoint.worker == worker:
            send, count = endpoint.send, 0

            def broken(to: int, message: Message) -> int:
                nonlocal count
                count += 1
                return send(to, BREAKS[what](message) if count > 2 else message)

            endpoint.send = broken  # type: ignore[method-assign]
        return endpoint

    return wrap


@pytest.mark.parametrize(
    ("worker", "what"), [(0, "shape"), (0, "dtype"), (0, "count"), (0, "header"), (1, "shape"), (1, "count")]
)
def test_a_run_over_grpc_ends_by_the_name_of_whoever_sends_something_else(worker: int, what: str) -> None:
    place = bench("mlp")
    plan = place.plan(VARIANTS["1f1b"], 2, 2, "grpc")
    with pytest.raises(UnfitMessageError, match=r"it sent a message on channel \d that does not fit") as caught:
        place.verify(plan, wrap=breaking(worker, what))
    assert caught.value.subject == f"worker {worker}"
    assert "none are due" not in caught.value.got  # what was sent is known
