"""Refuse models of which ``torch.export`` would silently drop a part, or with parts that stages do not support.

An exported graph has the operations of a forward and nothing else of the user's code: not the backward of a
``torch.autograd.Function``, no gradient hooks; and a number drawn by Python or NumPy becomes a constant. A run would
still equal its reference bit for bit, but not be the user's training.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx

from roundelay.errors import CaptureError
from roundelay.frontend.export.gradient_hooks import only_looks
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK
from roundelay.reach.reachable_state import PYTHON_GENERATORS, ReachableState

_KEPT = "operations with gradients of torch's own: a stage's backward runs no user code"


def refuse_parts(model: torch.nn.Module) -> None:
    """Refuse a model with compiled parts, with hooks on gradients, or with sparse buffers.

    Raises:
        CaptureError: naming the parameter, the buffer or the module.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name!r} of the model",
                got=f"a tensor of layout {tensor.layout}",
                expected="dense tensors, which can be sent and saved",
                remedy=f"Keep it dense: {name} = {name}.to_dense(), with torch.mm in the place of torch.sparse.mm.",
            )
    for name, parameter in model.named_parameters():
        changing = [hook for hook in (parameter._backward_hooks or {}).values() if not only_looks(hook, parameter)]
        if changing or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise _hook(f"parameter {name!r}")
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _hook(f"module {name!r} ({type(module).__name__})")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {name!r}",
                got=f"a {type(module).__name__} of torch.jit",
                expected="a module in Python, which torch.export can follow",
                remedy="Leave out torch.jit.script and torch.jit.trace; --compile makes stages faster.",
            )


def refuse_sparse(graph: torch.fx.Graph) -> None:
    """Refuse operations that make sparse gradients.

    Raises:
        CaptureError: naming the operation.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            places = {argument.name: i for i, argument in enumerate(node.target._schema.arguments)}
            i = places.get("sparse", len(node.args))
            if node.kwargs.get("sparse") is True or (i < len(node.args) and node.args[i] is True):
                raise CaptureError(
                    f"operation {node.name!r} ({node.target}) of the model's forward",
                    got="sparse=True, and with it a sparse gradient",
                    expected="dense gradients, which can be summed and sent",
                    remedy="Leave out sparse=True, and take an optimizer for dense gradients.",
                )


def refuse_vmap(graph: torch.fx.Graph) -> None:
    """Refuse torch.vmap, which counts its nesting level in operations between which the graph could not be cut.

    Raises:
        CaptureError: the forward uses torch.vmap, or a function built on it.
    """
    for node in graph.nodes:
        if getattr(node.target, "__module__", "") == "torch._functorch.predispatch":
            raise CaptureError(
                "torch.vmap in the model's forward (associative_scan and torch.func are built on it)",
                got=f"operation {node.name!r}",
                expected="operations on whole tensors, between which the model can be cut",
                remedy="Write it with operations over all rows at once: broadcasting, torch.einsum, torch.cumsum.",
            )


@contextmanager
def refusing_tensor_hooks() -> Iterator[None]:
    """Refuse code within the block that registers gradient hooks on tensors, by a CaptureError."""
    tensor: Any = torch.Tensor
    register_hook, hooked = tensor.register_hook, [False]

    def recording(self: torch.Tensor, hook: Any) -> Any:
        hooked[0] |= sys._getframe(1).f_globals.get("__name__", "").split(".")[0] != "torch"
        return register_hook(self, hook)

    with mock.patch.object(tensor, "register_hook", recording):
        yield
    if hooked[0]:
        raise _hook("a tensor of the model's forward")


def refuse_own_backwards(outputs: Iterable[torch.Tensor]) -> None:
    """Refuse outputs computed by a user's autograd function.

    Raises:
        CaptureError: naming the function.
    """
    for node in autograd_nodes(outputs):
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and not kind.__module__.startswith("torch._"):  # these export keeps
            raise _own_backward(kind)


def autograd_nodes(tensors: Iterable[torch.Tensor], known: Container[Any] = ()) -> Iterator[Any]:
    """Every node of the autograd graphs of some tensors, once, without known ones and what lies below these alone."""
    left, seen = [tensor.grad_fn for tensor in tensors], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen and node not in known:
            seen.add(node)
            yield node
            left += [below for below, _ in node.next_functions]


@contextmanager
def refusing_draws(what: str = "the model's forward") -> Iterator[None]:
    """Refuse code within the block that draws from Python's or NumPy's default generators.

    Other threads that draw, as a data loader's may, wait for the block's end.

    Args:
        what: the code's name, the subject of the CaptureError.
    """
    with DEFAULT_GENERATOR_LOCK:
        state = ReachableState(PYTHON_GENERATORS)
        yield
        changes = state.changes()
    if changes:
        raise CaptureError(
            what,
            got=f"a number drawn by {changes[0].slot.path}",
            expected="torch's random numbers, which do not depend on where and how often a stage computes",
            remedy="Draw with torch, for example torch.rand(()), and choose with torch.where instead of `if`.",
        )


def _hook(where: str) -> CaptureError:
    return CaptureError(
        where,
        got="a hook on its gradient that is not known to only look at it",
        expected=_KEPT,
        remedy="Remove the hook; put what it does into the loss, or into the optimizer's step. A hook on a parameter "
        "that only looks at its gradient is called before each update.",
    )


def _own_backward(kind: type) -> CaptureError:
    remedy = "Write it with torch operations (x + (y - x).detach() has y's value and x's gradient), or make it an "
    remedy += "operator: torch.library.custom_op with register_autograd."
    if kind.__module__ == "torch.utils.checkpoint":
        remedy = "Give activation checkpointing use_reentrant=False, or leave it out: `--recompute NAME,...` does the "
        remedy += "same for modules."
    return CaptureError(
        f"torch.autograd.Function {kind.__qualname__!r} in the model's forward",
        got="a backward of its own, which torch.export drops",
        expected=_KEPT,
        remedy=remedy,
    )
