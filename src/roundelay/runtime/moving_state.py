"""A stage's state on its way from holder to holder (Cyclic Data Parallelism, Sect. 4.4): weights, buffers, gradients.

A holder that has handed the state on keeps no weights, not even those that its tapes will need: their tensors stay, but
their memory is freed, and filled again when the state comes back for the backward (as PyTorch's FSDP does). Optimizer
state stays where the updates are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from roundelay.runtime.gradients import Gradients
from roundelay.transport.endpoint import Value

Weights = dict[str, torch.Tensor]


@dataclass(slots=True)
class Carried:
    """What a stage's state has beside its newest weights.

    Args:
        kept: older versions that are still read.
        recorded: buffers that a coming checkpoint or evaluation needs, by updates.
    """

    kept: dict[int, Weights]
    recorded: dict[int, Weights]


@final
class MovingState:
    """One holder's access to a stage's state.

    Args:
        parameters: by name; their data are replaced.
        buffers: by name; replaced.
        gradients: of the stage.
        carried: the rest; changed.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        buffers: Weights,
        gradients: Gradients,
        carried: Carried,
    ) -> None:
        self._parameters, self._buffers, self._gradients, self._carried = parameters, buffers, gradients, carried
        self._like = {name: (p.shape, p.stride(), p.dtype, p.device) for name, p in parameters.items()}
        #: by version, tensors without memory that a tape has read
        self._emptied: dict[int, Weights] = {}

    def leave(self) -> None:
        """Have none of it, as at the beginning on all holders but one."""
        self._carried.kept.clear()
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def pass_on(self, version: int, *, awaited: bool) -> tuple[Value, ...]:
        """The state as a message; this holder has none of it afterwards.

        Args:
            version: updates that the weights have seen.
            awaited: whether a tape waits for its backward, which needs its weights again.
        """
        carried = self._carried
        versions = {version: {name: p.data for name, p in self._parameters.items()}, **carried.kept}
        flat = [_flat(weight) for weights in versions.values() for weight in weights.values()]
        if awaited:
            flat, self._emptied = [weight.clone() for weight in flat], versions
            for weight in (weight for weights in versions.values() for weight in weights.values()):
                _resize(weight, 0)
        buffers = [b.contiguous() for own in (self._buffers, *carried.recorded.values()) for b in own.values()]
        numbers = [(len(found), *found) for found in (carried.kept, carried.recorded)]
        message: tuple[Value, ...] = (*numbers[0], *numbers[1], *flat, *buffers, *self._gradients.carried)
        carried.recorded.clear()
        self._gradients.carried = ()
        self.leave()
        return message

    def take(self, version: int, message: tuple[Any, ...]) -> None:
        """Take the state from a message of :meth:`pass_on`."""
        parts = iter(message)

        def numbers() -> list[int]:
            return [next(parts) for _ in range(next(parts))]

        def named(names: Mapping[str, Any]) -> Weights:
            return {name: next(parts) for name in names}

        older, updates = numbers(), numbers()
        newest = self._filled(version, named(self._like))
        for name, parameter in self._parameters.items():
            parameter.data = newest[name]
        self._carried.kept |= {known: self._filled(known, named(self._like)) for known in older}
        self._buffers |= named(self._buffers)
        self._carried.recorded |= {due: named(self._buffers) for due in updates}
        self._gradients.carried, self._emptied = tuple(parts), {}

    def _filled(self, version: int, flat: Weights) -> Weights:
        """Weights of a version in memory of this holder: where a tape has read them, in its tensors."""
        weights = self._emptied.get(version) or {
            n: torch.empty_strided(*own[:2], dtype=own[2], device=own[3]) for n, own in self._like.items()
        }
        for name, weight in weights.items():
            _resize(weight, flat[name].nbytes)
            _flat(weight).copy_(flat[name])
        return weights


def _resize(weight: torch.Tensor, num_bytes: int) -> None:
    """Free or allocate a tensor's memory, unless the user's program has made it unresizable, as ``numpy()`` does."""
    storage = weight.untyped_storage()
    if storage.resizable():
        storage.resize_(num_bytes)


def _flat(weight: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory, as a tensor that shares it; writing to it is not seen by autograd."""
    count = weight.untyped_storage().nbytes() // weight.element_size()
    return torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight.untyped_storage(), 0, (count,), (1,))
