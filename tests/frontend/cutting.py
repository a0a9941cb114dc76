"""Cut a captured model, run the pieces by hand, and run the same model uncut: eagerly, and as the exported graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundelay.frontend import Captured, Mode, RngKey, StageFunction, StageTape, capture
from roundelay.ir.graph import COUNT, LOSS
from roundelay.ir.stage import Partition, StageSpec
from roundelay.lower.partition import partition
from tests.equivalence.eager import masks_as_traced
from tests.zoo import ZOO, Batch, Entry, arguments, rows

Tensors = dict[str, Tensor]
ROWS = 4
DRAW = RngKey(11, 5)
MODES: tuple[Mode, ...] = ("stash", "recompute", "mixed")


@functools.cache
def captured_of(name: str) -> Captured:
    """A model of the zoo, captured once; nothing that a test does changes it."""
    entry = ZOO[name]
    return capture(entry.build(0), entry.loss, sample(name), entry.inputs)


def sample(name: str, seed: int = 1) -> Batch:
    """Four rows of a model's data, in memory of their own."""
    batch = rows(ZOO[name].batches(seed, 1)[0], 0, ROWS)
    return {n: t.clone() for n, t in batch.items()} if isinstance(batch, dict) else tuple(t.clone() for t in batch)


def weights_of(captured: Captured, noise: float = 0.0, seed: int = 3) -> Tensors:
    """Copies of the weights, each moved by ``noise`` times a normal number."""
    draws = torch.Generator().manual_seed(seed)
    return {
        n: p.detach() + noise * torch.randn(p.shape, generator=draws, dtype=p.dtype)
        for n, p in captured.parameters().items()
    }


def buffers_of(captured: Captured) -> Tensors:
    """Copies of the buffers."""
    return {n: b.clone() for n, b in captured.buffers().items()}


def even_cuts(captured: Captured, num_stages: int, places: Sequence[int] | None = None) -> Partition:
    """Stages of about as many operations each, cut anywhere or at some of the legal places."""
    graph = captured.graph
    wanted = [len(graph.ops) * (k + 1) // num_stages - 1 for k in range(num_stages - 1)]
    ends: list[int] = []
    for place in wanted:
        free = [cut for cut in (graph.cuts if places is None else places) if not ends or cut > ends[-1]]
        ends.append(min(free, key=lambda cut: abs(cut - place)))
    return cut_after(captured, ends)


def plain_cuts(captured: Captured, batch: Batch) -> list[int]:
    """The legal places over which the model itself hands nothing but contiguous tensors.

    At any other a tensor is laid out anew, as a network delivers it. Then some processors' kernels for attention give
    other last bits than those that the person's module gets.
    """
    graph = captured.graph
    number = {op.name: i for i, op in enumerate(graph.ops)}
    last = {name: i for i, op in enumerate(graph.ops) for name in op.reads} | dict.fromkeys(graph.outputs, len(number))
    strided: set[int] = set()

    def look(operation: int, carry_out: Callable[[], Any]) -> Any:
        made = carry_out()
        strided.update([operation] if isinstance(made, Tensor) and not made.is_contiguous() else [])
        return made

    captured.walk(batch, look)
    crossed = [(made, last.get(name, made)) for name, made in number.items() if made in strided]
    return [cut for cut in graph.cuts if not any(made <= cut < read for made, read in crossed)]


def cut_after(captured: Captured, ends: Sequence[int]) -> Partition:
    """A stage ends after each of these operations, and after the last."""
    ops = captured.graph.ops
    return partition(captured.graph, [[ops[end].name] for end in [*ends, len(ops) - 1]])


@dataclass(slots=True)
class Forward:
    """One stage's forward: what it read and made."""

    spec: StageSpec
    function: StageFunction
    params: Tensors
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    tape: StageTape


@dataclass(slots=True)
class Done:
    """What a forward and a backward through all stages have made.

    Args:
        loss: the loss, or its sum.
        count: the loss's count, or None.
        grads: of parameters, by name.
        buffers: after the forward.
        forwards: one per stage.
        entering: gradients that entered each stage's backward.
        leaving: gradients of each stage's inputs.
    """

    loss: Tensor
    count: Tensor | None
    grads: Tensors
    buffers: Tensors
    forwards: list[Forward]
    entering: list[dict[str, Tensor | None]]
    leaving: list[Tensors]


def forwards(
    captured: Captured, cut: Partition, batch: Batch, params: Tensors, buffers: Tensors, **options: Any
) -> list[Forward]:
    """Forward of every stage, each with buffers of its own; ``buffers`` then holds what they have become.

    Options are ``draw``, ``mode``, ``measure`` and ``halved``.
    """
    values: dict[str, Any] = dict(captured.values(batch))
    given = {"draw": DRAW, "mode": "stash", "measure": False, "halved": False} | options
    entering, done = dict(buffers), []
    for spec in cut.stages:
        function = captured.stage(spec, halved=given["halved"])
        inputs = {n: values[n] for n in function.inputs}
        params_of, own = {n: params[n] for n in spec.parameters}, {n: entering[n].clone() for n in spec.buffers}
        before = {n: b.clone() for n, b in own.items()}
        outputs, tape = function.forward(
            params_of, own, inputs, given["draw"], mode=given["mode"], measure=given["measure"]
        )
        values |= outputs
        buffers |= {n: b for n, b in own.items() if not torch.equal(b, before[n])}
        done.append(Forward(spec, function, params_of, inputs, outputs, tape))
    return done


def backwards(
    made: Sequence[Forward], params: Tensors
) -> tuple[Tensors, list[dict[str, Tensor | None]], list[Tensors]]:
    """Backward of every stage, the last one first; the weights' halves at the very end, where there are any."""
    grads: dict[str, Tensor] = {LOSS: torch.ones_like(made[-1].outputs[LOSS])}
    of_params: Tensors = {}
    entering: list[dict[str, Tensor | None]] = []
    leaving: list[Tensors] = []
    for one in reversed(made):
        entering.insert(0, {n: grads.pop(n, None) for n in one.function.outputs})
        of_inputs, own = one.function.backward(one.tape, entering[0], {n: params[n] for n in one.spec.parameters})
        grads |= of_inputs
        leaving.insert(0, of_inputs)
        of_params |= own
    for one in made:
        of_params |= one.function.backward_weights(one.tape.debt)
    return of_params, entering, leaving


def run(captured: Captured, cut: Partition, batch: Batch, params: Tensors, **options: Any) -> Done:
    """Forward with ``params`` and backward with ``later`` (or ``params``), through all stages.

    Options are ``later``, ``buffers``, ``draw``, ``mode``, ``measure`` and ``halved``.
    """
    buffers = options.pop("buffers", None) or buffers_of(captured)
    later = options.pop("later", params)
    made = forwards(captured, cut, batch, params, buffers, **options)
    grads, entering, leaving = backwards(made, later)
    return Done(made[-1].outputs[LOSS], made[-1].outputs.get(COUNT), grads, buffers, made, entering, leaving)


class Reseeded(TorchFunctionMode):
    """Seeds torch's own generator before every random operation, with the key of its place in the order of calls."""

    def __init__(self, draw: RngKey) -> None:
        super().__init__()
        self._draw = draw
        self._position = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _draws(func, args, kwargs or {}):
            torch.manual_seed(self._draw.key(self._position))
            self._position += 1
        return func(*args, **(kwargs or {}))


RANDOM = {
    "dropout", "dropout2d", "alpha_dropout", "feature_alpha_dropout", "rand_like", "randn", "bernoulli", "lstm", "gru",
}  # fmt: skip


def _draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)) > 0
    return name in RANDOM


@dataclass(slots=True)
class Eager:
    """The uncut model, run by torch alone."""

    loss: Tensor
    count: Tensor | None
    grads: Tensors
    buffers: Tensors


def eager(entry: Entry, batch: Batch, params: Tensors, draw: RngKey = DRAW) -> Eager:
    """The person's own module with weights ``params`` and the loss; random operations keyed as ours are."""
    model = entry.build(0)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            named[name].copy_(value)
    args, kwargs = arguments(entry, batch)
    with torch.random.fork_rng(devices=[]), Reseeded(draw), masks_as_traced():
        outputs = model(*args, **kwargs)
    loss = entry.loss(outputs, batch)
    loss, count = loss if isinstance(loss, tuple) else (loss, None)
    loss.backward()
    grads = {n: p.grad for n, p in named.items() if p.grad is not None}
    return Eager(loss.detach(), count, grads, dict(model.named_buffers()))


def differing(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names that only one side has, or whose tensors are not equal bit for bit."""
    return sorted(
        name for name in left.keys() | right.keys()
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    )  # fmt: skip


def modules_with_hooks(model: nn.Module) -> list[str]:
    """Modules that have any forward or backward hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [name for name, module in model.named_modules() if any(getattr(module, kind) for kind in kinds)]
