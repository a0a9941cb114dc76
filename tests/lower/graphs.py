"""Graphs made by hand: a list of operations with what each reads and which parameters it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from roundelay.ir.graph import BATCH, INPUT, Graph, Op, Parameter, Value

LABELS = BATCH + "labels"
IDS = INPUT + "0"


class Step(NamedTuple):
    """One operation of a graph to be made."""

    name: str
    reads: Sequence[str] = ()
    parameters: Sequence[str] = ()
    buffers: Sequence[str] = ()


def value_of(name: str, *, grad: bool = True) -> Value:
    """A tensor of four floats."""
    return Value(name, "tensor", (4,), "float32", 16, grad)


def graph_of(
    steps: Sequence[Step],
    *,
    outputs: Sequence[str] = (),
    frozen: Sequence[str] = (),
    without_grad: Sequence[str] = (),
    cuts: Sequence[int] | None = None,
) -> Graph:
    """A graph with one input, labels for the loss, and legal cuts everywhere unless told.

    Args:
        steps: its operations.
        outputs: what the loss reads besides the labels; the last operation unless told.
        frozen: parameters that are not trained.
        without_grad: values through which no gradient flows.
        cuts: indices after which it may be cut.
    """
    parameters = dict.fromkeys(name for step in steps for name in step.parameters)
    values = {step.name: value_of(step.name, grad=step.name not in without_grad) for step in steps}
    values |= {name: value_of(name) for name in (IDS, LABELS)}  # even if they took one, no gradient goes to data
    return Graph(
        ops=tuple(
            Op(
                step.name,
                "aten.some.default",
                "",
                tuple(step.reads),
                tuple(step.parameters),
                tuple(step.buffers),
                1,
                -1,
            )
            for step in steps
        ),
        inputs=(IDS,),
        batch=(LABELS,),
        outputs=tuple(outputs) or (steps[-1].name,),
        values=values,
        parameters={name: Parameter(name, (4,), 16, name not in frozen) for name in parameters},
        buffers={name: 4 for step in steps for name in step.buffers},
        cuts=tuple(range(len(steps))) if cuts is None else tuple(cuts),
        loss_counts=False,
        fingerprint="a graph",
        sample_rows=4,
    )


def chain_of(size: int) -> Graph:
    """``a0 → a1 → ...``, each with a parameter of its own."""
    return graph_of([Step(f"a{i}", [f"a{i - 1}" if i else IDS], [f"w{i}"]) for i in range(size)])


def chosen(names: Sequence[str], bits: int) -> list[str]:
    """Those of ``names`` whose bit is set."""
    return [name for i, name in enumerate(names) if bits >> i & 1]


#: An operation as numbers, quick to draw: bits of what it reads (twice: both must agree), its parameters, its buffers.
STEPS = st.lists(
    st.tuples(st.integers(0, 511), st.integers(0, 511), st.integers(0, 15), st.integers(0, 3)), min_size=1, max_size=8
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any graph of up to eight operations: they read what was made before and share parameters at will."""
    steps: list[Step] = []
    for reads, also, parameters, buffers in draw(STEPS):
        known = [IDS, *(step.name for step in steps)]
        weights = chosen(["w0", "w1", "w2", "w3"], parameters)
        steps.append(Step(f"a{len(steps)}", chosen(known, reads & also), weights, chosen(["b0", "b1"], buffers)))
    names = [step.name for step in steps]
    return graph_of(
        steps,
        outputs=chosen([IDS, *names], draw(st.integers(0, 511))),
        frozen=chosen(["w0", "w1", "w2", "w3"], draw(st.integers(0, 15))),
        without_grad=chosen(names, draw(st.integers(0, 255))),
    )


@st.composite
def cuts_for(draw: st.DrawFn, graph: Graph) -> list[list[str]]:
    """Stages of one or more segments, ending at any operation."""
    names = [op.name for op in graph.ops]
    ends = [*chosen(names[:-1], draw(st.integers(0, 127))), names[-1]]
    closes = draw(st.integers(0, 127))
    stages: list[list[str]] = [[]]
    for i, name in enumerate(ends):
        stages[-1].append(name)
        if closes >> i & 1 and i + 1 < len(ends):
            stages.append([])
    return stages
