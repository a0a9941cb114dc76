"""Where a captured job and plain PyTorch differ: what is compared, how exactly, and how a difference is told.

Equal bits are asked for everywhere. Where they are not the same, gradients may differ by what rounding explains, as a
share of the norm of their layer's gradient: that of an attention's key bias is zero but for rounding, and has no size
of its own to measure by. Weights are compared behind an update with equal gradients, so they have no such excuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from roundelay.api.plain_stepper import same_number
from roundelay.frontend.precision import FULL
from roundelay.ir.graph import Graph
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan

Tensors = Mapping[str, torch.Tensor]

LOSS, GRADIENT, DOUBLE, LOW = 1e-5, 1e-4, 1e-9, 3e-2
"""Shares by which losses, and gradients of a layer, may differ where bits do: in single precision; in double; lower."""

FLOOR = 1e-5
"""Of the whole model's gradient: what a layer's norm is taken for at least."""

FUSED = 1e-6
"""Of a weight, where an optimizer updates many in one call."""


class Difference(Exception):
    """The captured job and plain PyTorch differ.

    Args:
        kind: ``forward``, ``backward``, ``optimizer``, ``buffer`` or ``evaluate``.
        told: what differs, at which update, by how much.
    """

    def __init__(self, kind: str, told: str) -> None:
        super().__init__(told)
        self.kind, self.told = kind, told


class Judgement:
    """What has been compared so far; each method raises :class:`Difference` where more differs than may.

    Args:
        graph: of the captured model, to name operations.
        plan: what it is computed by.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph = graph
        self._low = plan.compile or plan.precision != FULL
        #: all bits so far are the same
        self.exact = True
        #: the operation nearest the loss from which on gradients have other bits
        self.operator = ""
        #: more or fewer random numbers are drawn
        self.shifted = False
        self.updates = self.compared = 0
        self.gradients_seen: set[str] = set()
        self.notes: list[str] = []

    def generator(self, own: int, plain: int) -> None:
        """Compare what stands for the random numbers that a micro-batch has drawn."""
        self.shifted = self.shifted or own != plain

    def loss(self, update: int, header: MicroBatch, own: Sequence[float], plain: Sequence[float]) -> None:
        """Compare a micro-batch's loss and the number of its terms."""
        self._number(update, _of(header, "the loss"), own[0], plain[0])
        self._number(update, _of(header, "the number of terms that the loss has summed"), own[1], plain[1])

    def metrics(self, update: int, own: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]]) -> None:
        """Compare what the loss returns beside the loss."""
        for name, values in plain.items():
            for ours, theirs in zip(own.get(name, values), values, strict=False):
                self._number(update, f"the metric {name!r}", ours, theirs)

    def gradients(self, update: int, own: Tensors, plain: Tensors) -> list[str]:
        """Compare the gradients of an update; returns the names of those with other bits."""
        whole = _norm(plain.values())
        layers: dict[str, list[torch.Tensor]] = {}
        for name, gradient in plain.items():
            layers.setdefault(_layer(name), []).append(gradient)
        differing = []
        for name in dict.fromkeys([*plain, *own]):
            self.compared += 1
            self.gradients_seen.add(name)
            if not self._same_gradient(update, name, own.get(name), plain.get(name), whole, layers):
                differing.append(name)
        if differing:
            self.exact = False
            self.operator = self.operator or self._nearest_the_loss(differing)
        return differing

    def _same_gradient(
        self,
        update: int,
        name: str,
        own: torch.Tensor | None,
        plain: torch.Tensor | None,
        whole: float,
        layers: Mapping[str, Sequence[torch.Tensor]],
    ) -> bool:
        """Whether the bits are the same, or one side has none where the other has zeros."""
        if own is None or plain is None:
            there = plain if own is None else own
            if there is None or not bool(_dense(there).any()):
                return True
            one, other = ("plain PyTorch", "the captured job") if own is None else ("the captured job", "plain PyTorch")
            told = f"{one} has one of norm {_norm([there]):.3g}, and {other} none"
            raise Difference("backward", f"the gradient of parameter {name!r} in update {update}: {told}")
        own = _dense(own)
        if same(own, plain):
            return True
        apart = _norm([own - plain]) if own.shape == plain.shape else float("inf")
        size = max(_norm(layers[_layer(name)]), FLOOR * whole)
        if not apart <= self._share(plain) * size:
            told = f"by {apart:.3g}, where its layer's has norm {size:.3g}"
            raise Difference("backward", f"the gradient of parameter {name!r} in update {update} differs {told}")
        return False

    def clipped(self, update: int, own: Tensors, plain: Tensors) -> None:
        """Compare clipped gradients, whose norm is summed in another order."""
        for name, theirs in plain.items():
            ours = _dense(own[name]) if name in own else None
            if ours is not None and not same(ours, theirs):
                self.exact = False
                if not _norm([ours - theirs]) <= self._share(theirs) * max(
                    _norm([theirs]), FLOOR * _norm(plain.values())
                ):
                    raise Difference(
                        "optimizer", f"the clipped gradient of parameter {name!r} in update {update} differs"
                    )

    def buffers(self, update: int, own: Tensors, untouched: Tensors, plain: Tensors) -> None:
        """Compare the buffers behind the forwards of an update."""
        for name, theirs in plain.items():
            self.compared += 1
            ours = own.get(name, untouched.get(name))
            if ours is None:
                told = "the forward of plain PyTorch makes it, and the captured job has none"
                raise Difference("buffer", f"buffer {name!r} in update {update}: {told}")
            if same(ours, theirs):
                continue
            apart = _apart(ours, theirs)
            left = name in untouched and same(ours, untouched[name])
            rounding = theirs.is_floating_point() and apart <= (LOW if self._low else LOSS) * _norm([theirs])
            if left or not rounding:
                held = ": the captured job leaves it as it was" if left else ""
                raise Difference("buffer", f"buffer {name!r} in update {update} differs by {apart:.3g}{held}")
            self.exact = False

    def rates(self, update: int, own: Sequence[float], plain: Sequence[float]) -> None:
        """Compare the learning rates of the optimizer's groups."""
        if len(own) != len(plain):
            told = f"{len(own)} instead of {len(plain)}"
            raise Difference("optimizer", f"the number of the optimizer's groups in update {update}: {told}")
        for group, (ours, theirs) in enumerate(zip(own, plain, strict=True)):
            if ours != theirs:
                told = f"{ours:g} instead of {theirs:g}"
                raise Difference("optimizer", f"the learning rate of group {group} in update {update}: {told}")

    def weights(
        self,
        update: int,
        own: Tensors,
        untouched: Tensors,
        plain: Tensors,
        *,
        fused: bool,
        shared: Collection[str] = (),
    ) -> None:
        """Compare the weights behind an update whose gradients were the same.

        Args:
            update: its number.
            own: the stages' parameters.
            untouched: what the model had before the first update.
            plain: plain PyTorch's.
            fused: the optimizer updates many parameters in one call.
            shared: parameters that plain PyTorch steps more than once, as others lie in their memory.
        """
        for name, theirs in plain.items():
            self.compared += 1
            ours = own.get(name, untouched[name])
            if same(ours, theirs):
                continue
            apart = _apart(ours, theirs)
            if (fused or name in shared) and apart <= FUSED * _norm([theirs]):
                self.exact = False
                many = "parameters in one memory are stepped one after the other"
                many = "the optimizer updates many parameters in one call" if fused else many
                self.note(f"{many}: weights within rounding")
                continue
            raise Difference("optimizer", f"parameter {name!r} behind update {update} {self._why(name, own, apart)}")

    def _why(self, name: str, own: Tensors, apart: float) -> str:
        if name not in own:
            return f"differs by {apart:.3g}: no stage has it, as the loss does not depend on it"
        if name not in self.gradients_seen:
            return f"differs by {apart:.3g}, without any gradient"
        return f"differs by {apart:.3g}, though its gradient was the same"

    def note(self, told: str) -> None:
        """Note something that a person is to know, once."""
        if told not in self.notes:
            self.notes.append(told)

    def _number(self, update: int, what: str, own: float, plain: float) -> None:
        if same_number(own, plain):
            return
        self.exact = False
        if not abs(own - plain) <= (LOW if self._low else LOSS) * max(abs(plain), 1e-3):
            raise Difference("forward", f"{what} in update {update}: {own:.9g} instead of {plain:.9g}")

    def _share(self, plain: torch.Tensor) -> float:
        if self._low or plain.dtype.itemsize < torch.float32.itemsize:
            return LOW
        return DOUBLE if plain.dtype in (torch.float64, torch.complex128) else GRADIENT

    def _nearest_the_loss(self, names: Sequence[str]) -> str:
        """The last operation of the graph that reads one of these parameters."""
        for op in reversed(self._graph.ops):
            if set(op.parameters) & set(names):
                return f"{op.target} of {op.module or 'the model'}"
        return ""


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; what is no number is the same as what is none."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one, two) or bool(((one == two) | ((one != one) & (two != two))).all())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    if one.shape != two.shape:
        return float("inf")
    return _norm([one - two if one.is_complex() else one.double() - two.double()])


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    """Common 2-norm of tensors of any kind."""
    squares = 0.0
    for tensor in tensors:
        dense = _dense(tensor)
        squares += float(torch.linalg.vector_norm(dense if dense.is_complex() else dense.double())) ** 2
    return float(squares**0.5)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _of(header: MicroBatch, what: str) -> str:
    return what if header.count == 1 else f"{what} of micro-batch {header.index}"
