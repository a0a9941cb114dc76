"""Graphs as data from outside: taken as written, refused by name, and never anything else."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from roundelay.errors import PlanError, RoundelayError
from roundelay.frontend import RngKey, capture
from roundelay.frontend.plain_operators import operations
from roundelay.frontend.plain_stage import plain_stage, rebuilt
from roundelay.ir.plain_bytes import decoded, encoded
from roundelay.ir.plain_graph import (
    Body,
    Call,
    Constant,
    Held,
    Input,
    Limits,
    List,
    PlainGraph,
    PlainSegment,
    PlainStage,
    Ref,
    Tuple,
)
from roundelay.ir.plain_operations import ALLOWED, OPERATORS
from tests.frontend.cutting import even_cuts

ENCODE = msgspec.msgpack.Encoder().encode
X, KEY = Input("x", 2), Input("draw", -1)


def stage_of(*calls: Any, outputs: Any = None, nodes: Any = None) -> PlainStage:
    """A stage of one segment that reads ``x`` and returns its last value."""
    every = (X, KEY, *calls) if nodes is None else nodes
    results = (Ref(len(every) - 1),) if outputs is None else outputs
    segment = PlainSegment(PlainGraph(every, results), 0, 1, (), (), ("x",), ("y",), differentiable=("x",))
    return PlainStage(0, "fp32", (segment,), None, ("x",), ("y",))


def taken(stage: PlainStage, limits: Limits = Limits()) -> Any:  # noqa: B008
    """What becomes of a stage that comes as bytes."""
    return rebuilt(decoded(ENCODE(stage), limits), halved=False, limits=limits)


def call(operation: str, *args: Any, **kwargs: Any) -> Call:
    return Call("mine", operation, args, kwargs, -1)


def test_what_is_written_is_read() -> None:
    held = Held("c", "float32", (2,), torch.tensor([1.5, -0.0]).view(torch.uint8).numpy().tobytes())
    stage = stage_of(held, call("aten.add.Tensor", Ref(0), Ref(2), alpha=2), call("python.getitem", Ref(3), 0))
    assert decoded(encoded(stage)) == stage
    function = taken(stage)
    x = torch.randn(3, 2)
    outputs, _ = function.forward({}, {}, {"x": x}, RngKey(0, 0), mode="stash")
    assert torch.equal(outputs["y"], torch.add(x, torch.tensor([1.5, -0.0]), alpha=2)[0])


def test_numbers_keep_their_types_and_bits() -> None:
    values = (1, 1.0, True, None, float("inf"), -float("inf"), 0.1, -0.0, 1 << 62, "tanh", List((1, Tuple((2,)))))
    again = decoded(ENCODE(stage_of(call("aten.relu.default", *values)))).segments[0].graph.nodes[2].args  # type: ignore[union-attr]
    assert [(type(a), repr(a)) for a in again] == [(type(a), repr(a)) for a in values]


BAD_NAMES = (
    *("aten.from_file.default", "aten.set_.source_Storage", "aten.as_strided.default", "aten.empty.memory_format"),
    *("aten.resize_.default", "aten._cudnn_init_dropout_state.default", "os.system", "builtins.eval", "aten.linear"),
    *("aten.linear.default.__class__", "__class__", "", "python.getattr", "torch.load", "torch.ops.aten.add.Tensor"),
    *("roundelay.", "aten.add.out", "aten.new_empty.default", "python.call", "aten.linear.default "),
)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_an_operation_that_is_not_in_the_list_is_refused_by_name(name: str) -> None:
    assert name not in ALLOWED
    with pytest.raises(PlanError, match="operation 'mine': got '"):
        decoded(ENCODE(stage_of(call(name, Ref(0)))))


def test_nothing_in_the_list_takes_files_memory_or_code_and_all_is_known_here() -> None:
    forbidden = (
        "from_file",
        "set_",
        "as_strided",
        "resize",
        "empty",
        "storage",
        "pin_memory",
        "cudnn",
        "load",
        "pickle",
    )
    assert [name for name in OPERATORS if any(word in name.split(".")[1] for word in forbidden)] == []
    assert operations().keys() == ALLOWED
    for name in OPERATORS:
        assert "Storage" not in str(operations()[name].target._schema)


EVIL = "alpha=__import__('os').abort(), out"
DROPOUT, RELU = Constant("operator", "aten.dropout.default"), Constant("operator", "aten.relu.default")
EMPTY = Body("b", PlainGraph((), ()))
GOOD = stage_of(call("aten.relu.default", Ref(0)))


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (stage_of(call("aten.relu.default", Ref(3))), "node 3 as an argument; expected one of the 2 before it"),
        (stage_of(call("aten.relu.default", Ref(2))), "node 2 as an argument"),
        (stage_of(call("aten.cat.default", List((Ref(0), Ref(9))))), "node 9 as an argument"),
        (stage_of(outputs=(Ref(5),)), "the result of a graph: got node 5"),
        (stage_of(call("aten.relu.default")), "0 arguments, without 'self'; expected 1 or more"),
        (stage_of(call("aten.relu.default", Ref(0), 1)), "2 arguments in order; expected at most 1"),
        (stage_of(call("aten.add.Tensor", Ref(0), 1, beta=2)), "an argument 'beta'; expected one of alpha by name"),
        (stage_of(call("aten.add.Tensor", Ref(0), 1, **{EVIL: 2})), f"an argument {EVIL!r}"),
        (stage_of(EMPTY, call("torch.set_grad_enabled", True, Ref(2), **{EVIL: 1})), f"an argument {EVIL!r}"),
        (stage_of(call("roundelay.keyed_call", DROPOUT, Ref(0), 0.5, True, draw=Ref(1), position=0, **{EVIL: 1})),
         f"an argument {EVIL!r}"),
        (stage_of(call("python.mul", "x", Ref(0))), "x as an argument; expected nodes and numbers"),
        (stage_of(call("python.mul", 3, 5)), "no node among its arguments"),
        (stage_of(call("aten.add.Tensor", Ref(0), 1, self=Ref(0))), "an argument 'self'"),
        (stage_of(call("python.getitem", Ref(0))), "1 arguments, without 'two'"),
        (stage_of(call("aten.to.dtype", Ref(0), Constant("dtype", "quint8"))), "dtype 'quint8' as an argument"),
        (stage_of(call("aten.to.device", Ref(0), Constant("device", "cuda:7"))), "device 'cuda:7' as an argument"),
        (stage_of(call("aten.to.dtype", Ref(0), Constant("module", "os"))), "module 'os' as an argument"),
        (stage_of(call("roundelay.keyed_call", RELU, Ref(0), draw=Ref(1), position=0)),
         "a call of Constant"),
        (stage_of(call("roundelay.keyed_call", "aten.dropout.default", draw=Ref(1), position=0)), "a call of aten"),
        (stage_of(call("roundelay.keyed_dropout", Ref(0), 0.5, True, draw=Ref(0), position=0)), "another key"),
        (stage_of(call("roundelay.keyed_dropout", Ref(0), 0.5, True, draw=Ref(1), position=-1)), "a position of -1"),
        (stage_of(call("roundelay.keyed_dropout", Ref(0), 0.5, True, position=1)), "without 'draw'"),
        (stage_of(call("roundelay.keyed_attention", Ref(0), Ref(0), Ref(0), draw=Ref(1), position=0, dropout=Ref(0))),
         "an argument 'dropout'"),
        (stage_of(call("roundelay.branch", Ref(0), Ref(0), Ref(0))), "no graph as its argument 1"),
        (stage_of(Body("b", PlainGraph((), ())), call("aten.relu.default", Ref(2))), "a graph as an argument"),
        (stage_of(call("torch.autocast", "cuda", None, True, False, Ref(0))), "no graph as its argument 4"),
        (stage_of(nodes=(X, call("aten.relu.default", Ref(0)), KEY)), "input 'draw': got a place after other nodes"),
        (stage_of(nodes=(X, call("aten.relu.default", Ref(0)))), "a graph of 1 inputs; expected 1 of its"),
        (stage_of(outputs=()), "0 results for 1 names"),
        (stage_of(Held("c", "float32", (3,), b"1234")), "tensor 'c': got 4 bytes; expected 12 for its sizes"),
        (stage_of(Held("c", "object", (1,), b"1234")), "tensor 'c': got dtype 'object'"),
        (stage_of(Held("c", "uint8", (1 << 61, 1 << 61), b"")), "got 0 bytes; expected 4611686018427387904"),
        (stage_of(Held("c", "float32", (0, 1 << 61, 1 << 61), b"")), "tensor 'c': got"),
        (msgspec.structs.replace(GOOD, outputs=("z",)), "an output 'z' that no segment"),
        (msgspec.structs.replace(GOOD, inputs=()), "a segment that reads 'x'"),
        (msgspec.structs.replace(GOOD, precision="fp8"), "precision 'fp8'"),
        (msgspec.structs.replace(stage_of(), segments=()), "no segments"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(stage: PlainStage, words: str) -> None:
    with pytest.raises(PlanError) as raised:
        taken(stage)
    assert words in str(raised.value)


HUGE = 1 << 40


@pytest.mark.parametrize(
    "made",
    [
        call("aten.full.default", List((HUGE,)), 1.0),
        call("aten.zeros.default", List((1 << 20, 1 << 20))),
        call("aten.ones.default", List((1 << 15, 1 << 15))),
        call("aten.zeros.default", Tuple((Ref(0), HUGE))),
        call("aten.arange.default", HUGE),
        call("aten.arange.start_step", 0, 1, 1e-12),
        call("aten.arange.start", 0, float("inf")),
        call("aten.arange.default", float("nan")),
        call("aten.linspace.default", 0.0, 1.0, HUGE),
        call("aten.eye.m", 1 << 20, 1 << 20),
        call("aten.expand.default", Ref(0), List((HUGE, -1, -1))),
        call("aten.repeat.default", Ref(0), List((1 << 16, 1 << 16))),
        call("aten.repeat_interleave.self_int", Ref(0), HUGE),
        call("aten.new_zeros.default", Ref(0), List((HUGE,))),
        call("aten.pad.default", Ref(0), List((0, HUGE))),
        call("aten.one_hot.default", Ref(0), HUGE),
        call("aten.upsample_nearest2d.vec", Ref(0), List((1 << 20, 1 << 20)), None),
        call("python.mul", Ref(0), HUGE),
        call("roundelay.keyed_call", Constant("operator", "aten.rand.default"), List((HUGE,)), draw=Ref(1), position=0),
    ],
    ids=lambda made: made.operation,
)
def test_a_tensor_beyond_the_limits_is_refused_before_it_is_made(made: Call) -> None:
    with pytest.raises(PlanError, match=r"operation 'mine' .*: got a tensor of [\d,]+ elements; expected at most"):
        taken(stage_of(made))


def test_limits_may_be_tightened() -> None:
    stage = stage_of(call("aten.ones.default", List((100,))))
    taken(stage, Limits(elements=100))
    for limits, words in (
        (Limits(elements=99), "100 elements"),
        (Limits(nodes=2), "3 nodes"),
        (Limits(encoded_bytes=20), "bytes"),
    ):
        with pytest.raises(PlanError, match=words):
            taken(stage, limits)


def test_nodes_of_graphs_in_graphs_count_and_nesting_ends() -> None:
    inner = PlainGraph(tuple(Input("a", 1) for _ in range(60)), ())
    with pytest.raises(PlanError, match="nodes"):
        taken(stage_of(Body("one", inner), Body("two", inner)), Limits(nodes=100))
    for _ in range(8):
        inner = PlainGraph((Body("in", inner),), ())
    with pytest.raises(PlanError, match="graphs in graphs"):
        taken(stage_of(Body("out", inner)))
    deep: Any = 1
    for _ in range(9):
        deep = List((deep,))
    with pytest.raises(PlanError, match="lists in lists"):
        taken(stage_of(call("aten.relu.default", deep)))
    for depth in (100_000, 3_000):
        with pytest.raises(PlanError, match="a stage as data"):
            decoded(b"\x92\xa1l\x91" * depth)


def test_nothing_from_outside_is_in_the_code_that_torch_generates() -> None:
    name = "x\n    import os; os.abort()\n#"
    stage = stage_of(Call(name, "aten.gelu.default", (Ref(0),), {"approximate": '"); import os; os.abort(); ("'}, 2))
    nodes = (Input(name, 2), Input(name, -1), *stage.segments[0].graph.nodes[2:])
    function = taken(stage_of(nodes=nodes))
    code = function.segments[0].call.__self__.code
    assert "input_0" in code
    assert "os.abort()\n" not in code
    with pytest.raises(RuntimeError, match="approximate"):
        function.segments[0].call(torch.ones(2, 2), None)


@cache
def sample() -> PlainStage:
    """A small stage with everything in it: buffers, random numbers, a constant, scopes, a loss with metrics."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4)
            result: torch.Tensor = self.inner(x * scale)
            return result

    def loss(outputs: Any, batch: Any) -> Any:
        return {"loss": functional.cross_entropy(outputs, batch[1]), "size": outputs.square().mean()}

    captured = capture(Model(), loss, (torch.randn(4, 4), torch.tensor([0, 1, 2, 0])))
    return plain_stage(captured, even_cuts(captured, 1).stages[0])


def test_the_sample_is_taken() -> None:
    assert [isinstance(node, Body) for node in sample().segments[0].graph.nodes].count(True) == 1
    assert decoded(encoded(sample())) == sample()
    assert rebuilt(sample(), halved=True).halved


def takes_or_refuses(data: bytes) -> bool:
    """Whether bytes are taken; refused by name otherwise, and without much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        stage = decoded(data)
        for halved in (False, True):
            rebuilt(stage, halved=halved)
    except RoundelayError:
        return False
    finally:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    return True


@given(st.data())
def test_mutated_bytes_are_a_stage_or_refused(data: st.DataObject) -> None:
    own = bytearray(encoded(sample()))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(own) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "drop"]))
        if kind == "set":
            own[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del own[place + 1 :]
        elif kind == "insert":
            own[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del own[place]
    takes_or_refuses(bytes(own))


ODD = st.sampled_from(
    [
        *(None, True, -1, 0, 1, 1 << 30, (1 << 62) - 1, -(1 << 63), 0.5, float("nan"), float("inf"), "", "cpu", EVIL),
        *("x" * 2000, b"", b"12345678", [], ["r", 0], ["r", 1 << 40], ["l", []], ["t", [["r", 0]]], {}, {EVIL: 1}),
        *(["c", "dtype", "int8"], ["c", "operator", "aten.dropout.default"]),
        *(["call", "a", "aten.relu.default", [["r", 0]], {}, 2], *sorted(ALLOWED)),
    ]
)


def places(part: Any) -> list[tuple[Any, Any]]:
    """Every item of nested lists and dicts: its container and its key."""
    if not isinstance(part, (dict, list)):
        return []
    items = list(part.items()) if isinstance(part, dict) else list(enumerate(part))
    return [*((part, key) for key, _ in items), *(place for _, value in items for place in places(value))]


@given(st.data())
def test_mutated_structures_are_a_stage_or_refused(data: st.DataObject) -> None:
    raw = msgspec.msgpack.decode(encoded(sample()))
    for _ in range(data.draw(st.integers(1, 3))):
        of, key = data.draw(st.sampled_from(places(raw)))
        of[key] = data.draw(ODD)
    takes_or_refuses(ENCODE(raw))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert not takes_or_refuses(data)


ANY: dict[str, Callable[[], Any]] = {"refs": lambda: Ref(0), "ints": lambda: 3, "lists": lambda: List((1, 2))}


@pytest.mark.parametrize("kind", ANY)
def test_every_operation_takes_its_arguments_or_refuses_them(kind: str) -> None:
    for name in sorted(ALLOWED):
        for count in range(12):
            takes_or_refuses(ENCODE(stage_of(call(name, *(ANY[kind]() for _ in range(count))))))
