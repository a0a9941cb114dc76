"""Runs code of the user's on a device for which it does not ask: a loss that makes tensors, or holds some.

A job stays on the CPU, so its loss makes targets, masks and indices there (``torch.arange(n)``), and holds class
weights there. On a stage's device all of these are wanted where its values are. So under :class:`OnDevice` a tensor is
made on the device unless the code names another, and a tensor of the CPU that meets one of the device is copied there:
once, if the code keeps it (writes through `.data` are not seen). What the code writes into, it finds written: there the
others are copied to the CPU. A precision that it lowers, or does not lower, for the CPU is that of the device.

With the CPU as the place, tensors that a loss has left on a device come back to it: `evaluate` computes there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.weak import WeakIdKeyDictionary

from roundelay.frontend.stages.retarget_device import CPU

_TENSOR: Any = torch.Tensor

_CROSSING = {_TENSOR.to, _TENSOR.copy_, _TENSOR.type_as, _TENSOR.data.__set__, _TENSOR.grad.__set__}
"""What may take tensors of two devices, as it is for that."""

_TO_NUMPY = {_TENSOR.numpy, _TENSOR.__array__}
"""What a tensor of the CPU alone can do: metrics of other libraries ask for it."""


@final
class OnDevice(TorchFunctionMode):
    """A context in which code that was written for the CPU computes on a device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        #: tensor of elsewhere to its version and its copy, while it lives
        self._copies: Any = WeakIdKeyDictionary()

    def __enter__(self) -> OnDevice:
        _redirect_autocast()
        _entered().append(self._device.type)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _entered().pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors():
            generator = kwargs.get("generator")
            if kwargs.get("device") is None and (generator is None or generator.device.type != "cpu"):
                kwargs = {**kwargs, "device": self._device}
            return func(*args, **kwargs)
        if func in _TO_NUMPY and args[0].device == self._device:
            return func(args[0].detach().cpu() if args[0].requires_grad else args[0].cpu(), *args[1:], **kwargs)
        if func not in _CROSSING and _are_mixed(args, kwargs):
            return self._together(func, args, kwargs)
        return func(*args, **kwargs)

    def _together(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of tensors of two devices with all of them on one."""
        written = kwargs.get("out", args[0] if args and _writes(func) else None)
        if isinstance(written, torch.Tensor) and written.device != self._device:
            there = partial(torch.Tensor.to, device=written.device)
            return func(*_mapped(args, there), **_mapped(kwargs, there))
        return func(*_mapped(args, self._here), **_mapped(kwargs, self._here))

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.requires_grad:  # a copy that gradients flow through is of this call
            return tensor.to(self._device)
        version, copy = self._copies.get(tensor, (-1, tensor))
        if version != tensor._version:
            copy = tensor.to(self._device)
            self._copies[tensor] = tensor._version, copy
        found: torch.Tensor = copy
        return found


def on_device(device: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called under an :class:`OnDevice` of its own; on the CPU the function itself."""
    if device == CPU:
        return call
    mode = OnDevice(device)

    def called(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return call(*args, **kwargs)

    return called


_OF_THREAD = threading.local()


def _entered() -> list[str]:
    """The types of the devices whose contexts this thread is in, the innermost last."""
    if not hasattr(_OF_THREAD, "types"):
        _OF_THREAD.types = []
    types: list[str] = _OF_THREAD.types
    return types


@cache
def _redirect_autocast() -> None:
    """Let torch's autocast for the CPU be one for the device, within a context; once for the process."""
    init = torch.autocast.__init__

    def there(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        entered = _entered()
        init(self, entered[-1] if entered and device_type == CPU.type else device_type, *args, **kwargs)

    torch.autocast.__init__ = there  # type: ignore[method-assign]


def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"


def _are_mixed(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors of the CPU and of a device among the arguments."""
    devices = {tensor.device for tensor in _tensors((args, kwargs))}
    return CPU in devices and len(devices) > 1


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
