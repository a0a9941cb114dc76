"""The graph's input tensors from a micro-batch, and refusal of micro-batches that the captured graph does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import Batch, copy_batch, fields, fresh, layout, num_rows
from roundelay.frontend.export.export import Exported
from roundelay.frontend.export.export_adapter import CallShape, Inputs
from roundelay.frontend.model_call import call_inputs
from roundelay.ir.graph import BATCH, INPUT, Graph


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """How the model was called for the sample; every other call may differ from it in its tensors only.

    Args:
        graph: names the tensors.
        exported: knows which sizes may vary.
        inputs: batch -> (args, kwargs).
        call: layout of the call for the sample.
        layout: of the sample, as :func:`roundelay.frontend.batch.layout` describes it.
        writes: whether ``inputs`` writes into tensors of the batch, so that it gets copies.
    """

    graph: Graph
    exported: Exported
    inputs: Inputs
    call: CallShape
    layout: Any
    writes: bool
    _known_sizes: set[tuple[torch.Size, ...]] = field(default_factory=set, init=False)

    def values(self, micro_batch: Batch) -> dict[str, torch.Tensor]:
        """The graph's inputs and the batch tensors that the loss reads, by value name, from one micro-batch.

        Raises:
            JobError: the call or the batch differs from the sample's in more than its tensors.
        """
        if self.graph.one_row and num_rows(micro_batch) == 1:
            raise JobError(
                "a batch of one row",
                got=self.graph.one_row,
                expected="at least two rows, from which BatchNorm computes its statistics in training mode",
                remedy="Leave a last batch of one row out: DataLoader(..., drop_last=True), or another batch_size.",
            )
        batch = self._copy(micro_batch)
        tensors, call = CallShape.flatten(*call_inputs(self.inputs, batch))
        self._check_constants(call)
        if not self._fits(call, tensors):
            raise JobError(
                "the call of the model",
                got=f"{len(tensors)} tensors in the layout {call.spec} with constants {list(call.constants.values())}",
                expected=f"{len(self.graph.inputs)} tensors in the layout of the first batch, {self.call.spec}, "
                f"with constants {list(self.call.constants.values())}",
                remedy="Call the model the same way for every batch; only tensors may differ.",
            )
        self._check_sizes(tensors)
        named = {INPUT + str(i): tensor for i, tensor in enumerate(tensors)}
        found = self._fields(batch)
        return named | {name: found[name.removeprefix(BATCH)] for name in self.graph.batch}

    def check_numbers(self, micro_batch: Batch) -> None:
        """Refuse a micro-batch whose call differs in a number or another constant, or has sizes that do not fit.

        All other differences are left to :meth:`values`.

        Raises:
            JobError: it does.
        """
        try:
            tensors, call = CallShape.flatten(*call_inputs(self.inputs, self._copy(micro_batch)))
        except Exception:  # raised by user code
            return
        self._check_constants(call)
        if self._fits(call, tensors):
            self._check_sizes(tensors)

    def _copy(self, micro_batch: Batch) -> Batch:
        """A batch that ``inputs`` may change: the micro-batch's values may be needed again."""
        return copy_batch(micro_batch) if self.writes else fresh(micro_batch)

    def _fits(self, call: CallShape, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call whose constants are the sample's has its layout, too."""
        same = call is self.call or call.spec == self.call.spec
        return same and len(tensors) == len(self.graph.inputs)

    def _fields(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Tensors of a batch by path."""
        found = fields(batch)
        missing = [name.removeprefix(BATCH) for name in self.graph.batch if name.removeprefix(BATCH) not in found]
        if missing:
            raise JobError(
                "the batch",
                got=f"no tensor {' and no '.join(map(repr, missing))}, only {', '.join(map(repr, found))}",
                expected="every tensor that the loss read on the first batch",
                remedy="Let batches(epoch) yield the same fields in every batch.",
            )
        if (other := layout(batch)) != self.layout:
            raise JobError(
                "the batch",
                got=_described(other),
                expected=f"{_described(self.layout)}, as in the first batch: keys, lengths of lists, what is None",
                remedy="Let batches(epoch) yield the same fields in every batch, with tensors for what varies.",
            )
        return found

    def _check_constants(self, call: CallShape) -> None:
        if (difference := call.differing(self.call)) is None:
            return
        where, now, first = difference
        raise JobError(
            f"the call of the model, {where}",
            got=f"{now!r:.80}",
            expected=f"{first!r:.80} as for the first batch: what is not a tensor must be the same in every call",
            remedy="Give a number that varies as a tensor, in batches(epoch) or in Job(inputs=...): "
            "torch.tensor(number)."
            if isinstance(first, (int, float))
            else "Leave out of the call what the model does not read, by Job(inputs=...); give what selects a branch "
            "as a tensor of numbers, for example one-hot, and weight the branches by it.",
        )

    def _check_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes in self._known_sizes:
            return
        for i, (shape, sizes) in enumerate(zip(shapes, self.exported.sizes, strict=True)):
            if len(shape) != len(sizes) or any(s not in (None, n) for s, n in zip(sizes, shape, strict=True)):
                raise JobError(
                    f"tensor {i} of the model's call",
                    got=f"sizes {tuple(shape)}",
                    expected=f"sizes {tuple('any' if s is None else s for s in sizes)}, as the model was captured",
                    remedy=_remedy_for_sizes(sizes, shape),
                )
        try:
            self.exported.guard(tensors)
        except AssertionError as error:
            raise JobError(
                "the tensors of the model's call",
                got=f"sizes {', '.join(str(tuple(shape)) for shape in shapes)}: {error}",
                expected="sizes for which the model takes the same branches as for the first batch",
                remedy="The model branches on sizes during capture: make the batches alike in the sizes it tests.",
            ) from error
        self._known_sizes.add(shapes)


def _remedy_for_sizes(sizes: Sequence[int | None], shape: Sequence[int]) -> str:
    """What to do about a size other than the one that capture has fixed."""
    if len(sizes) == len(shape) and any(s == 1 != n for s, n in zip(sizes, shape, strict=True)):
        return "Capture fixes a size of one: let a batch with more come first, or pad every batch to the same size."
    if len(sizes) == len(shape) and sizes[0] not in (None, shape[0]):
        return (
            "The model fixes the number of rows during capture (len(x) is a number, x.size(0) may vary; a loss "
            "between the rows of a batch): leave a short last batch out by drop_last=True, or use x.size(0)."
        )
    return (
        "The model fixes these sizes during capture (a loop over time steps fixes its length; nn.LSTM, nn.GRU "
        "and nn.RNN do not): pad every batch to the same size."
    )


def _described(part: Any) -> str:
    """A layout in words: where tensors are, where None is."""
    if isinstance(part, dict):
        return "{" + ", ".join(f"{key!r}: {_described(value)}" for key, value in part.items()) + "}"
    if isinstance(part, list):
        return f"a sequence of {len(part)}: " + ", ".join(map(_described, part))
    return "no tensor" if part is ... else "None" if part else "a tensor"
