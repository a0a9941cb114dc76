"""What a forward does while it is traced that a trace would not show, made visible or refused.

In a trace a module's parameters and buffers are stand-ins. A forward that reaches the tensors themselves on another way
(a list, a partial, a view that ``__init__`` has kept) would have them taken for constants, and be trained without them.
Here every call of torch gets the stand-ins in their place. ``x.data`` is read as ``x.detach()``, which a trace knows;
checks of values that torch makes in Python (of distributions' arguments, of masks) are left out, as they would have to
be decided once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from roundelay.errors import CaptureError, RoundelayError
from roundelay.frontend.export_substitutes import standing_in
from roundelay.frontend.source_lines import users_line

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Owner:
    """Where a module keeps a parameter or a buffer: its dict, the name in it, and the tensor itself."""

    held: dict[str, Any]
    name: str
    tensor: torch.Tensor


Owners = Mapping[int, Owner]
"""Of the storages of a model's parameters and buffers, by address, the first that lies there."""


def owners_of(model: torch.nn.Module) -> Owners:
    """Those of a model that is not traced."""
    found: dict[int, Owner] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and (address := _address(tensor)):
                    found.setdefault(address, Owner(held, name, tensor))
    return found


def _address(tensor: Any) -> int:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # one that has no memory
        return 0


@final
class Tracing(TorchFunctionMode):
    """While it lasts, the model's own tensors are taken for what stands for them in the trace.

    Args:
        owners: of the model's tensors.
    """

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self._owners = owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call torch with stand-ins."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # a branch of torch.cond: dynamo would trace this function itself
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and getattr(func, "__self__", None) is torch.Tensor.data:
            return self._data(name, args)
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise _own_generator(name)
        if name != "__get__":
            args = tuple([self._traced(arg) for arg in args])
            kwargs = {key: self._traced(arg) for key, arg in kwargs.items()}
        return func(*args, **kwargs)

    def _data(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "__get__":
            return self._traced(args[0]).detach()
        raise CaptureError(
            f"an assignment to .data in the model's forward{users_line()}",
            got="a tensor that gets other memory",
            expected="operations that a graph can hold",
            remedy="Write into a buffer with buffer.copy_(value), and leave parameters to the optimizer.",
        )

    def _traced(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._traced(part) for part in value])
        if type(value) not in _PLAIN:
            return value
        owner = self._owners.get(_address(value))
        return value if owner is None else _seen_as(value, owner)


def _seen_as(value: torch.Tensor, owner: Owner) -> torch.Tensor:
    """What stands for a tensor that lies in the memory of a module's own: the same window into what stands for that."""
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


def _own_generator(name: str) -> CaptureError:
    return CaptureError(
        f"torch.{name} in the model's forward{users_line()}",
        got="numbers drawn from a torch.Generator of its own",
        expected="random numbers of torch's default generator: every place then draws by the run's seed",
        remedy="Leave generator= out; --seed makes them the same in every run.",
    )


@contextmanager
def traced_as_trained(owners: Owners) -> Iterator[None]:
    """The context in which a forward is traced.

    Args:
        owners: of the model's tensors, found before the trace.

    Raises:
        CaptureError: the forward does what no stage could do.
    """
    with refusing_seeds(), refusing_grad(_forces), checks_left_out(), standing_in(), Tracing(owners):
        yield


def _forces(where: str) -> CaptureError:
    return CaptureError(
        f"torch.autograd.grad in the model's forward{where}",
        got="a gradient that the forward computes (forces from an energy, for example)",
        expected="a forward that is differentiated once: a stage runs its backward once, and keeps no graph of it",
        remedy="Train this model in plain PyTorch, or predict the gradient by an output of its own.",
    )


@contextmanager
def refusing_grad(refusal: Callable[[str], RoundelayError]) -> Iterator[None]:
    """Refuse a call in this block of ``torch.autograd.grad``, with what a refusal says of the line that calls it.

    Raises:
        RoundelayError: it is called.
    """
    grad = torch.autograd.grad

    def refuse(*_: Any, **__: Any) -> Any:
        raise refusal(users_line())

    torch.autograd.grad = refuse
    try:
        yield
    finally:
        torch.autograd.grad = grad


@contextmanager
def checks_left_out() -> Iterator[None]:
    """Without the checks of values that torch makes in Python: a trace would have to decide them once for all.

    Of the arguments of distributions, and whether a mask that was given is the causal one: it is taken as it is.
    """
    before = Distribution._validate_args
    detects = transformer._detect_is_causal_mask
    Distribution.set_default_validate_args(False)
    transformer._detect_is_causal_mask = _only_if_said
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detects
        Distribution.set_default_validate_args(before)


def _only_if_said(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


_UNLIKELY = 0x5EED_0F_A_F0_12_3A
"""A seed that nobody sets."""


@contextmanager
def refusing_seeds() -> Iterator[None]:
    """Refuse a forward in this block that seeds torch's default generator.

    Raises:
        CaptureError: it does.
    """
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(_UNLIKELY)
    lines: list[str] = []
    seed = torch.manual_seed

    def noting(number: Any) -> torch.Generator:
        lines.append(users_line())
        return seed(number)

    torch.manual_seed = torch.random.manual_seed = noting  # type: ignore[assignment]
    try:
        yield
        seeded = torch.initial_seed() != _UNLIKELY
    finally:
        torch.manual_seed = torch.random.manual_seed = seed
        torch.random.set_rng_state(state)
    if seeded or lines:
        raise CaptureError(
            f"torch.manual_seed in the model's forward{lines[0] if lines else ''}",
            got="a seed for torch's default generator, which all of the process would draw by",
            expected="random numbers of a seed that the run sets",
            remedy="Take the seed out of the forward; for numbers that are the same at every call, make them in "
            "__init__ and keep them with register_buffer.",
        )
