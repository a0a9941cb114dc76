"""Runs code of the user's on a device for which it does not ask: a loss that makes tensors, or holds some.

A job stays on the CPU, so its loss makes targets, masks and indices there (``torch.arange(n)``), and holds class
weights there. On a stage's device all of these are wanted where its values are. So under :class:`OnDevice` a tensor is
made on the device unless the code names another, and a tensor of the CPU that meets one of the device is copied there:
once, if the code keeps it. What the code writes into, it finds written: there the others are copied to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

from roundelay.frontend.retarget_device import CPU

_TENSOR: Any = torch.Tensor

_CROSSING = {_TENSOR.to, _TENSOR.copy_, _TENSOR.type_as, _TENSOR.data.__set__, _TENSOR.grad.__set__}
"""What may take tensors of two devices, as it is for that."""

_TO_NUMPY = {_TENSOR.numpy, _TENSOR.__array__}
"""What a tensor of the CPU alone can do: metrics of other libraries ask for it."""


@final
class OnDevice(TorchFunctionMode):
    """A context in which code that was written for the CPU computes on a device.

    Args:
        place: the device.
    """

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self._place = place
        #: tensor of the CPU to its version and its copy, while it lives
        self._copies: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors():
            generator = kwargs.get("generator")
            if kwargs.get("device") is None and (generator is None or generator.device.type != "cpu"):
                kwargs = {**kwargs, "device": self._place}
            return func(*args, **kwargs)
        if func in _TO_NUMPY and args[0].device == self._place:
            return func(args[0].detach().cpu() if args[0].requires_grad else args[0].cpu(), *args[1:], **kwargs)
        if func not in _CROSSING and _are_mixed(args, kwargs, self._place):
            return self._together(func, args, kwargs)
        return func(*args, **kwargs)

    def _together(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of tensors of two devices with all of them on one."""
        written = kwargs.get("out", args[0] if args and _writes(func) else None)
        if isinstance(written, torch.Tensor) and written.device == CPU:
            return func(*_mapped(args, torch.Tensor.cpu), **_mapped(kwargs, torch.Tensor.cpu))
        return func(*_mapped(args, self._here), **_mapped(kwargs, self._here))

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != CPU:
            return tensor
        if tensor.requires_grad:  # a copy that gradients flow through is of this call
            return tensor.to(self._place)
        version, copy = self._copies.get(tensor, (-1, tensor))
        if version != tensor._version:
            copy = tensor.to(self._place)
            self._copies[tensor] = tensor._version, copy
        found: torch.Tensor = copy
        return found


@contextmanager
def autocast_there(place: torch.device) -> Iterator[None]:
    """A context in which code that lowers the precision for the CPU, where it was written, lowers it for a device."""
    init = torch.autocast.__init__

    def there(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, place.type if device_type == CPU.type else device_type, *args, **kwargs)

    torch.autocast.__init__ = there  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]


def on_device(place: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called under an :class:`OnDevice` of its own; on the CPU the function itself."""
    if place == CPU:
        return call
    mode = OnDevice(place)

    def called(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return call(*args, **kwargs)

    return called


def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _are_mixed(args: Any, kwargs: Any, place: torch.device) -> bool:
    """Whether there are tensors of the CPU and of the device among the arguments."""
    devices = {tensor.device for tensor in _tensors((args, kwargs))}
    return CPU in devices and place in devices


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
