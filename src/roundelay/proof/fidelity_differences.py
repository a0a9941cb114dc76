"""Compares a captured job's tensors with plain PyTorch's, and describes the first difference.

Equal bits are expected everywhere. Where they differ, gradients may differ by rounding, measured as a share of the norm
of their layer's gradient: the gradient of an attention's key bias, for example, is zero but for rounding, and has no
norm of its own to measure by. Weights are compared after an update with equal gradients, so they may not differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from roundelay.frontend.stages.precision import FULL
from roundelay.ir.graph import Graph
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.runtime.optimizer.nested_state import same_value

Tensors = Mapping[str, torch.Tensor]

LOSS, GRADIENT, DOUBLE, LOW = 1e-5, 1e-4, 1e-9, 3e-2
"""Tolerances, as shares, where bits differ: of losses; of a layer's gradients in single, double and half precision."""

FLOOR = 1e-5
"""Share of the whole model's gradient norm that is used for a layer's norm at least."""

FUSED = 1e-6
"""Tolerance of a weight's norm if the optimizer updates many parameters in one call."""


class FidelityDifference(Exception):
    """The captured job and plain PyTorch differ.

    Args:
        kind: ``forward``, ``backward``, ``optimizer``, ``buffer`` or ``evaluate``.
        text: what differs, at which update, by how much.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


class DifferenceChecker:
    """Compares updates; each method raises :class:`FidelityDifference` if a difference exceeds the tolerance.

    Args:
        graph: of the captured model, to name operations.
        plan: with which the captured job is computed.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph = graph
        self._low = plan.compile or plan.precision != FULL
        #: all bits so far are equal
        self.exact = True
        #: the operation nearest the loss at which gradients' bits differ
        self.operator = ""
        #: the captured job draws more or fewer random numbers
        self.shifted = False
        self.updates = self.compared = 0
        self.gradients_seen: set[str] = set()
        self.notes: list[str] = []

    def generator(self, own: int, plain: int) -> None:
        """Compare the states of the random generators after a micro-batch."""
        self.shifted = self.shifted or own != plain

    def loss(self, update: int, header: MicroBatch, own: Sequence[float], plain: Sequence[float]) -> None:
        """Compare a micro-batch's loss and the number of its terms."""
        self._number(update, _of(header, "the loss"), own[0], plain[0])
        self._number(update, _of(header, "the number of terms that the loss has summed"), own[1], plain[1])

    def metrics(self, update: int, own: Mapping[str, Sequence[float]], plain: Mapping[str, Sequence[float]]) -> None:
        """Compare the metrics that the loss function returns."""
        for name, values in plain.items():
            for ours, theirs in zip(own.get(name, values), values, strict=False):
                self._number(update, f"the metric {name!r}", ours, theirs)

    def gradients(self, update: int, own: Tensors, plain: Tensors) -> list[str]:
        """Compare the gradients of an update; returns the names of those whose bits differ."""
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
        """Whether the bits are equal, or one side has no gradient and the other zeros."""
        if own is None or plain is None:
            present = plain if own is None else own
            if present is None or not bool(_dense(present).any()):
                return True
            one, other = ("plain PyTorch", "the captured job") if own is None else ("the captured job", "plain PyTorch")
            text = f"{one} has one of norm {_norm([present]):.3g}, and {other} none"
            raise FidelityDifference("backward", f"the gradient of parameter {name!r} in update {update}: {text}")
        own = _dense(own)
        if same_value(own, plain):
            return True
        error = _norm([own - plain]) if own.shape == plain.shape else float("inf")
        size = max(_norm(layers[_layer(name)]), FLOOR * whole)
        if not error <= self._tolerance(plain) * size:
            text = f"by {error:.3g}, where its layer's has norm {size:.3g}"
            raise FidelityDifference(
                "backward", f"the gradient of parameter {name!r} in update {update} differs {text}"
            )
        return False

    def clipped(self, update: int, own: Tensors, plain: Tensors) -> None:
        """Compare clipped gradients; the norm that they are clipped by is summed in another order."""
        for name, theirs in plain.items():
            ours = _dense(own[name]) if name in own else None
            if ours is not None and not same_value(ours, theirs):
                self.exact = False
                if not _norm([ours - theirs]) <= self._tolerance(theirs) * max(
                    _norm([theirs]), FLOOR * _norm(plain.values())
                ):
                    raise FidelityDifference(
                        "optimizer", f"the clipped gradient of parameter {name!r} in update {update} differs"
                    )

    def buffers(self, update: int, own: Tensors, untouched: Tensors, plain: Tensors) -> None:
        """Compare the buffers after the forwards of an update."""
        for name, theirs in plain.items():
            self.compared += 1
            ours = own.get(name, untouched.get(name))
            if ours is None:
                text = "the forward of plain PyTorch makes it, and the captured job has none"
                raise FidelityDifference("buffer", f"buffer {name!r} in update {update}: {text}")
            if same_value(ours, theirs):
                continue
            error = _error(ours, theirs)
            unchanged = name in untouched and same_value(ours, untouched[name])
            rounding = theirs.is_floating_point() and error <= (LOW if self._low else LOSS) * _norm([theirs])
            if unchanged or not rounding:
                reason = ": the captured job does not change it" if unchanged else ""
                raise FidelityDifference("buffer", f"buffer {name!r} in update {update} differs by {error:.3g}{reason}")
            self.exact = False

    def rates(self, update: int, own: Sequence[float], plain: Sequence[float]) -> None:
        """Compare the learning rates of the optimizer's groups."""
        if len(own) != len(plain):
            text = f"{len(own)} instead of {len(plain)}"
            raise FidelityDifference("optimizer", f"the number of the optimizer's groups in update {update}: {text}")
        for group, (ours, theirs) in enumerate(zip(own, plain, strict=True)):
            if ours != theirs:
                text = f"{ours:g} instead of {theirs:g}"
                raise FidelityDifference("optimizer", f"the learning rate of group {group} in update {update}: {text}")

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
        """Compare the weights after an update whose gradients were the same.

        Args:
            update: its number.
            own: the stages' parameters.
            untouched: the model's parameters before the first update.
            plain: plain PyTorch's.
            fused: the optimizer updates many parameters in one call.
            shared: parameters whose memory plain PyTorch updates more than once, since others share it.
        """
        for name, theirs in plain.items():
            self.compared += 1
            ours = own.get(name, untouched[name])
            if same_value(ours, theirs):
                continue
            error = _error(ours, theirs)
            if (fused or name in shared) and error <= FUSED * _norm([theirs]):
                self.exact = False
                reason = "parameters that share memory are stepped one after the other"
                reason = "the optimizer updates many parameters in one call" if fused else reason
                self.note(f"{reason}: weights within rounding")
                continue
            raise FidelityDifference(
                "optimizer", f"parameter {name!r} after update {update} {self._why(name, own, error)}"
            )

    def _why(self, name: str, own: Tensors, error: float) -> str:
        if name not in own:
            return f"differs by {error:.3g}: no stage has it, as the loss does not depend on it"
        if name not in self.gradients_seen:
            return f"differs by {error:.3g}, without any gradient"
        return f"differs by {error:.3g}, though its gradient was the same"

    def note(self, text: str) -> None:
        """Add a note for the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _number(self, update: int, what: str, own: float, plain: float) -> None:
        if same_value(own, plain):
            return
        self.exact = False
        if not abs(own - plain) <= (LOW if self._low else LOSS) * max(abs(plain), 1e-3):
            raise FidelityDifference("forward", f"{what} in update {update}: {own:.9g} instead of {plain:.9g}")

    def _tolerance(self, plain: torch.Tensor) -> float:
        if self._low or plain.dtype.itemsize < torch.float32.itemsize:
            return LOW
        return DOUBLE if plain.dtype in (torch.float64, torch.complex128) else GRADIENT

    def _nearest_the_loss(self, names: Sequence[str]) -> str:
        """The last operation of the graph that reads one of these parameters."""
        for op in reversed(self._graph.ops):
            if set(op.parameters) & set(names):
                return f"{op.target} of {op.module or 'the model'}"
        return ""


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _error(one: torch.Tensor, two: torch.Tensor) -> float:
    if one.shape != two.shape:
        return float("inf")
    return _norm([one - two if one.is_complex() else one.double() - two.double()])


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    """The 2-norm over all tensors, of any dtype and layout."""
    squares = 0.0
    for tensor in tensors:
        dense = _dense(tensor)
        squares += float(torch.linalg.vector_norm(dense if dense.is_complex() else dense.double())) ** 2
    return float(squares**0.5)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _of(header: MicroBatch, what: str) -> str:
    return what if header.count == 1 else f"{what} of micro-batch {header.index}"
