"""Make visible or refuse what a forward does during a trace that the trace would not record.

During a trace a module's parameters and buffers are proxies. If a forward reached the tensors themselves through a
list, a partial or a view kept by ``__init__``, they would become constants of the trace, and not be trained. Here every
torch call gets the proxies instead. ``x.data`` is read as ``x.detach()``, which can be traced; checks of values that
torch makes in Python (of distributions' arguments, of masks) are skipped, as a trace would fix their outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final
from unittest import mock

import torch
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from roundelay.errors import CaptureError, RoundelayError
from roundelay.frontend.export.export_substitutes import substituting
from roundelay.frontend.export.traced_checks import TruthValues
from roundelay.reach.source_lines import users_line

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Owner:
    """Where a module keeps a parameter or a buffer: its dict, the name in it, and the tensor itself."""

    held: dict[str, Any]
    name: str
    tensor: torch.Tensor


Owners = Mapping[int, Owner]
"""For the storage address of every parameter and buffer, the first one stored there."""


def owners_of(model: torch.nn.Module) -> Owners:
    """The owners of a model's tensors; to be called before the trace."""
    owners: dict[int, Owner] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and (address := _address(tensor)):
                    owners.setdefault(address, Owner(held, name, tensor))
    return owners


def _address(tensor: Any) -> int:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # it has no storage
        return 0


@final
class ProxyMode(TorchFunctionMode):
    """Replaces the model's own tensors in every torch call by their proxies in the trace.

    Args:
        owners: of the model's tensors.
    """

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self._owners = owners
        #: the truth of tensors
        self.truths = TruthValues()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with proxies."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond: dynamo would trace this function itself
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and getattr(func, "__self__", None) is torch.Tensor.data:
            return self._data(name, args)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(
                f"torch.{name} in the model's forward{users_line()}",
                got="numbers drawn from a torch.Generator of its own",
                expected="random numbers of torch's default generator, which are keyed by the run's seed",
                remedy="Leave generator= out; --seed makes the numbers the same in every run.",
            )
        if name != "__get__":
            args = tuple([self._proxied(arg) for arg in args])
            kwargs = {key: self._proxied(arg) for key, arg in kwargs.items()}
        if self.truths.is_asked(name, args) and (truth := self.truths.truth(args[0])) is not None:
            return truth
        result = func(*args, **kwargs)
        self.truths.follow(name, args, result)
        return result

    def _data(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "__get__":
            return self._proxied(args[0]).detach()
        raise CaptureError(
            f"an assignment to .data in the model's forward{users_line()}",
            got="a tensor whose memory is replaced",
            expected="operations that a graph can hold",
            remedy="Write into a buffer with buffer.copy_(value), and leave parameters to the optimizer.",
        )

    def _proxied(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._proxied(part) for part in value])
        if type(value) not in _PLAIN:
            return value
        owner = self._owners.get(_address(value))
        return value if owner is None else _proxy_of(value, owner)


def _proxy_of(value: torch.Tensor, owner: Owner) -> torch.Tensor:
    """The proxy for a tensor stored in the memory of ``owner``: the same view of the owner's proxy."""
    tensor = owner.tensor
    traced: torch.Tensor = owner.held[owner.name]
    if traced is tensor:  # nothing is traced
        return value
    if not value.requires_grad:
        traced = traced.detach()
    if value.size() == tensor.size() and value.stride() == tensor.stride():
        return traced
    if value.is_contiguous() and tensor.is_contiguous() and value.numel() == tensor.numel():
        return traced.view(value.size())
    return traced.as_strided(value.size(), value.stride(), value.storage_offset() - tensor.storage_offset())


@contextmanager
def guarded_trace(owners: Owners) -> Iterator[TruthValues]:
    """Apply all guards of this module while a forward is traced.

    Args:
        owners: of the model's tensors, found before the trace.

    Yields:
        what the forward asks of tensors' values.

    Raises:
        CaptureError: the forward does something that a stage could not do.
    """
    remedy = "Train this model in plain PyTorch, or predict the gradient by an output of its own."
    no_grad = refusing_grad("the model's forward", CaptureError, remedy)
    with refusing_seeds(), no_grad, checks_left_out(), substituting(), ProxyMode(owners) as mode:
        yield mode.truths


@contextmanager
def refusing_grad(what: str, error: type[RoundelayError], remedy: str) -> Iterator[None]:
    """Refuse calls of ``torch.autograd.grad`` within the block.

    Args:
        what: the code in the block, for the error's subject.
        error: the class of the error.
        remedy: what the user can do instead.
    """

    def refuse(*_: Any, **__: Any) -> Any:
        raise error(
            f"torch.autograd.grad in {what}{users_line()}",
            got="a gradient that it computes itself (forces from an energy, or a gradient penalty)",
            expected="code that is differentiated once: a stage's backward runs once and is not differentiated itself",
            remedy=remedy,
        )

    with mock.patch.object(torch.autograd, "grad", refuse):
        yield


@contextmanager
def checks_left_out() -> Iterator[None]:
    """Skip checks of values that torch makes in Python, whose outcome a trace would fix.

    These are the checks of distributions' arguments, and whether a given mask is causal: it is used as it is.
    """

    def is_causal_mask(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return is_causal is True

    unvalidated = mock.patch.object(Distribution, "_validate_args", False)
    with unvalidated, mock.patch.object(transformer, "_detect_is_causal_mask", is_causal_mask):
        yield


_UNLIKELY = 0x5EED_0F_A_F0_12_3A
"""A seed that nobody sets."""


@contextmanager
def refusing_seeds() -> Iterator[None]:
    """Refuse code within the block that seeds torch's default generator, by a CaptureError.

    Other threads that seed it, as a data loader's may, wait: the caller holds their lock.
    """
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(_UNLIKELY)
    lines: list[str] = []
    seed = torch.manual_seed

    def recording(number: Any) -> torch.Generator:
        lines.append(users_line())
        return seed(number)

    torch.manual_seed = torch.random.manual_seed = recording  # type: ignore[assignment]
    try:
        yield
        seeded = torch.initial_seed() != _UNLIKELY
    finally:
        torch.manual_seed = torch.random.manual_seed = seed
        torch.random.set_rng_state(state)
    if seeded or lines:
        raise CaptureError(
            f"torch.manual_seed in the model's forward{lines[0] if lines else ''}",
            got="a seed for torch's default generator, which the whole process draws from",
            expected="random numbers that depend on the run's seed",
            remedy="Take the seed out of the forward; for numbers that are the same at every call, make them in "
            "__init__ and keep them with register_buffer.",
        )
