"""The loss as data: the person's function traced once, and compared with it on several numbers of rows.

What is traced is :class:`roundelay.frontend.loss.LossCall`, with its counts and metrics. A branch of Python on the
value of a tensor cannot be traced. Sizes that the trace has fixed or bounded travel with the graph, and every call
checks them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from roundelay.errors import CaptureError, JobError, RoundelayError
from roundelay.frontend.batch import Batch, as_tensor, rows_between, twice
from roundelay.frontend.batch import numbers as numbers_of
from roundelay.frontend.capture import Captured
from roundelay.frontend.export.export import Exported, export
from roundelay.frontend.export.export_adapter import CallShape
from roundelay.frontend.graph_run import DRAW, run_nodes
from roundelay.frontend.loss import LossCall
from roundelay.frontend.plain_pieces import cannot_travel, plain_graph, torch_graph
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK, RngKey
from roundelay.frontend.stages.make_segment import Arithmetic, drawing, loss_segment_of
from roundelay.frontend.stages.precision import autocast
from roundelay.frontend.stages.retarget_device import CPU, retarget
from roundelay.frontend.stages.segment import Segment
from roundelay.ir.graph import BATCH, LOSS
from roundelay.ir.plain_graph import LIMITS, Limits, PlainLoss, PlainSegment, refused
from roundelay.ir.stage import SegmentSpec, StageSpec
from roundelay.reach.reachable_state import DEFAULT_GENERATORS, ReachableState
from roundelay.reach.source_lines import users_line_of

_LARGEST = 1 << 60
_SPECIAL = 2
"""Sizes that are bounded by this or less are not: a trace treats 0 and 1 as special, and these are compared."""


def plain_loss(captured: Captured, spec: StageSpec) -> PlainLoss:
    """The loss of the last stage as data.

    Raises:
        CaptureError: it cannot be traced, keeps a state, or gives other bits than the person's function.
    """
    if captured.effects.of_loss:
        change = captured.effects.of_loss[0]
        raise cannot_travel("the loss", f"{change.slot.path}, which it changes", "a loss that keeps nothing")
    part, numbers = captured.builder.loss_spec(spec), _numbers(captured, spec)
    samples = list(_samples(captured, spec))
    if not samples:
        raise cannot_travel("the loss", "a batch on which it cannot be called again", "a loss of tensors")
    with DEFAULT_GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        exported = _traced(captured, numbers, samples[0])
    graph = plain_graph(_piece(exported), lambda node: f"the loss, operation {node.name!r} ({node.target})")
    sizes, bounds = _sizes(exported, len(part.inputs))
    segment = PlainSegment(
        graph, part.start, part.stop, (), (), part.inputs, part.outputs,
        differentiable=tuple(sorted(captured.builder.roles(part).differentiable)),
    )  # fmt: skip
    sent = tuple((place, int(as_tensor(number).imag)) for place, number in numbers.items())
    loss = PlainLoss(segment, captured.builder.loss_position, sizes, bounds, sent)
    _compare(captured, spec, loss, samples)
    return loss


def rebuilt_loss(plain: PlainLoss, arithmetic: Arithmetic, limits: Limits = LIMITS) -> Segment:
    """The segment of a loss as data.

    Raises:
        PlanError: it is refused.
    """
    part = plain.segment
    piece = retarget(torch_graph(part.graph, limits), arithmetic.device)
    spec = SegmentSpec(part.start, part.stop, (), (), part.inputs, part.outputs)

    def loss(*values: Any) -> Any:
        _check_sizes(plain, values)
        return piece.forward(*values, None)

    call = drawing(loss, plain.position, arithmetic.device)
    return loss_segment_of(call, spec, frozenset(part.differentiable), arithmetic)


def _numbers(captured: Captured, spec: StageSpec) -> dict[int, float]:
    """The numbers of the batch among what the loss reads, by place."""
    known = {BATCH + path: number for path, number in numbers_of(captured.builder.loss.layout).items()}
    found = {place: known[name] for place, name in enumerate(spec.loss_reads) if name in known}
    for place, number in found.items():
        if type(number) not in (int, float):
            got = f"a {type(number).__name__} of the batch"
            raise cannot_travel(f"the loss, which reads {spec.loss_reads[place]!r}", got, "tensors, int and float")
    return found


class _Loss(torch.nn.Module):
    """A loss as a module, to be exported; numbers of the batch come as tensors."""

    def __init__(self, call: LossCall, numbers: Mapping[int, float]) -> None:
        super().__init__()
        self._call, self._numbers = call, numbers

    def forward(self, *values: Any) -> tuple[torch.Tensor, ...]:
        """What the loss returns."""
        given = [self._number(i, value) if i in self._numbers else value for i, value in enumerate(values)]
        return tuple(self._call(*given))

    def _number(self, place: int, value: torch.Tensor) -> Any:
        number: Any = torch.real(value).item()
        return torch.sym_int(number) if type(self._numbers[place]) is int else number


def _traced(captured: Captured, numbers: Mapping[int, float], values: Sequence[torch.Tensor]) -> Exported:
    tensors, call = CallShape.flatten(tuple(values), {})
    loss = captured.builder.loss
    try:
        with torch.enable_grad(), autocast(captured.precision, CPU), _sizes_kept(loss.loss):
            return export(_Loss(loss, numbers), call, tensors)
    except CaptureError as error:
        cause = error.__cause__
        line = users_line_of(cause if isinstance(cause, Exception) else error)
        expected = "a loss without Python branches on tensors' values"
        raise cannot_travel(f"the loss{line}", error.got, expected) from error


def _piece(exported: Exported) -> torch.fx.GraphModule:
    """The loss's graph of what it reads and the key."""
    graph, owner = torch.fx.Graph(), torch.nn.Module()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    places = [node for node in exported.module.graph.nodes if node.op == "placeholder"]
    inputs = [node for node in places if exported.roles[node.name].kind == "input"]
    for node in sorted(inputs, key=lambda node: int(exported.roles[node.name].name)):
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    graph.placeholder(DRAW)
    for node in exported.module.graph.nodes:
        if node in env:
            continue
        if node.op in ("placeholder", "get_attr"):
            role = exported.roles.get(node.name)
            held = getattr(exported.module, str(node.target)) if role is None else role.tensor
            setattr(owner, node.name, held)
            env[node] = graph.get_attr(node.name)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    return torch.fx.GraphModule(owner, graph)


@contextmanager
def _sizes_kept(loss: Any) -> Iterator[None]:
    """Let ``len(tensor)`` in the person's function be a size that may vary, and no number, within the block."""
    function = inspect.unwrap(loss)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    if "len" in names:
        yield
        return
    names["len"] = lambda value: value.size(0) if isinstance(value, torch.Tensor) and value.ndim else len(value)
    try:
        yield
    finally:
        del names["len"]


def _sizes(exported: Exported, count: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """For which sizes of its inputs the graph holds; see :class:`roundelay.ir.plain_graph.PlainLoss`."""
    numbers: dict[Any, int] = {}
    bounds: list[tuple[int, int]] = []
    found: dict[int, tuple[int, ...]] = {}
    for node in exported.module.graph.nodes:
        role = exported.roles.get(node.name)
        if node.op == "placeholder" and role is not None and role.kind == "input":
            found[int(role.name)] = tuple(_size(size, numbers, bounds) for size in node.meta["val"].shape)
    return tuple(found[i] for i in range(count)), tuple(bounds)


def _size(size: Any, numbers: dict[Any, int], bounds: list[tuple[int, int]]) -> int:
    if is_concrete_int(size):
        return int(size)
    expression, known = size.node.expr, size.node.shape_env.var_to_range
    if expression not in known:
        got = f"a size that is {expression} of another"
        raise cannot_travel("the loss, which reads values of sizes that depend on each other", got, "free sizes")
    if expression not in numbers:
        numbers[expression] = len(bounds)
        lower, upper = known[expression].lower, known[expression].upper
        least = int(lower) if lower.is_finite and lower > _SPECIAL else 0
        bounds.append((least, int(upper) if upper.is_finite and upper < _LARGEST else _LARGEST))
    return -1 - numbers[expression]


def _check_sizes(plain: PlainLoss, values: Sequence[Any]) -> None:
    known: dict[int, int] = {}
    for place, kind in plain.numbers:
        if not isinstance(values[place], torch.Tensor) or values[place].dtype is not torch.complex128:
            raise refused(f"the loss, value {plain.segment.inputs[place]!r}", "no number", "a number of the batch")
        if not values[place].is_meta and int(values[place].imag) != kind:
            raise JobError(
                f"the loss, value {plain.segment.inputs[place]!r}",
                got="a number of another type than in the first batch",
                expected="the same type in every batch",
                remedy="Give numbers of the batch as float throughout, or as int.",
            )
    for name, sizes, value in zip(plain.segment.inputs, plain.sizes, values, strict=True):
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        if len(shape) != len(sizes) or not all(
            now == size if size >= 0 else _fits(plain, -1 - size, now, known)
            for size, now in zip(sizes, shape, strict=True)
        ):
            raise JobError(
                f"the loss, value {name!r}",
                got=f"sizes {list(shape)}",
                expected=f"sizes {['any' if size < 0 else size for size in sizes]}, for which it was traced",
                remedy="Pad the batches to one size, or let the loss take sizes from tensors (x.size(0), not len(x)).",
            )


def _fits(plain: PlainLoss, number: int, size: int, known: dict[int, int]) -> bool:
    least, most = plain.bounds[number]
    return least <= size <= most and known.setdefault(number, size) == size


def _samples(captured: Captured, spec: StageSpec) -> Iterator[list[torch.Tensor]]:
    """What the loss reads on the rows that it was observed on, on twice as many, and on one."""
    batch = captured.builder.loss.layout
    makes: list[Callable[[], Batch]] = [lambda: batch, lambda: twice(batch), lambda: rows_between(batch, 0, 1)]
    for make in makes:
        try:
            yield _values(captured, spec, make())
        except (RoundelayError, RuntimeError, ValueError, TypeError, IndexError):  # such a batch is never trained on
            continue


def _values(captured: Captured, spec: StageSpec, batch: Batch) -> list[torch.Tensor]:
    values, graph = _inputs(captured, batch), captured.graph
    with torch.enable_grad(), autocast(captured.precision, CPU), torch.random.fork_rng(devices=[]):
        results, _ = run_nodes(captured.builder.exported, [values[n] for n in graph.inputs], keep=graph.outputs)
    wanted = captured.builder.roles(captured.builder.loss_spec(spec)).differentiable
    every = {**results, **values}
    return [every[name].detach().contiguous().requires_grad_(name in wanted) for name in spec.loss_reads]


def _inputs(captured: Captured, batch: Batch) -> dict[str, torch.Tensor]:
    """The graph's inputs and what the loss reads of a batch; what the person's function changes is restored."""
    state = ReachableState([("inputs", captured.inputs.inputs), *DEFAULT_GENERATORS], torch.nn.Module())
    try:
        return captured.inputs.values(batch)
    finally:
        state.restore()


def _compare(captured: Captured, spec: StageSpec, plain: PlainLoss, samples: Sequence[list[torch.Tensor]]) -> None:
    """Compare the graph with the person's function, forward and backward.

    Raises:
        CaptureError: they differ on some number of rows.
    """
    arithmetic = Arithmetic(CPU, captured.precision)
    own, again = captured.builder.loss_segment(spec, CPU), rebuilt_loss(plain, arithmetic)
    for values in samples:
        inputs = dict(zip(spec.loss_reads, values, strict=True))
        try:
            wanted = _run(own, inputs)
        except Exception:  # of the person's own code: on so many rows it is never called
            if values is samples[0]:
                raise
            continue
        try:
            found = _run(again, inputs)
        except Exception as error:
            raise _differs(inputs, f"{type(error).__name__}: {error!s:.200}") from error
        for name, tensor in wanted.items():
            if name not in found or not _same(tensor, found[name]):
                raise _differs(inputs, f"another {name!r}: {found.get(name)!s:.80} instead of {tensor!s:.80}")


def _run(segment: Segment, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a loss returns, and the gradients of its inputs."""
    outputs, tape = segment.forward({}, {}, inputs, RngKey(7, 3))
    grads, _ = segment.backward(tape, {LOSS: torch.ones_like(outputs[LOSS])}, {})
    return {**outputs, **{f"gradient of {name}": grad for name, grad in grads.items()}}


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    same = one.dtype == two.dtype and one.shape == two.shape
    return same and bool(((one == two) | ((one != one) & (two != two))).all())


def _differs(inputs: dict[str, torch.Tensor], got: str) -> CaptureError:
    name, value = next(iter(inputs.items()))
    return cannot_travel(
        f"the loss on values such as {name!r} of sizes {list(value.shape)}", got, "the same bits on any number of rows"
    )
