"""``torch.export`` of an unmodified model, with readable errors when it fails.

The result is the training graph as exported: parameters, buffers, constants and the call's tensors are placeholders;
linear, attention, convolution and LSTM stay single operations.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest import mock

import torch
import torch.export._trace
import torch.fx
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from roundelay.deferred_signals import DeferredSignals, hides_interrupt, inside_torch
from roundelay.errors import CaptureError
from roundelay.frontend.export.autocast_regions import open_regions
from roundelay.frontend.export.export_adapter import CallShape, ExportAdapter, LazyBuffer, Roots, Seen
from roundelay.frontend.export.export_checks import refuse_parts, refuse_sparse, refuse_vmap
from roundelay.frontend.export.export_substitutes import substitute
from roundelay.frontend.export.recurrent import StandingIn
from roundelay.frontend.export.traced_numbers import TracedNumbers
from roundelay.reach.source_lines import users_line_of

PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Role:
    """What a placeholder of the exported graph stands for.

    ``name`` is the parameter's or buffer's first name in the model, or ``str(i)`` for the i-th tensor of the call;
    ``tensor`` is the original object (None for inputs).
    """

    kind: Literal["parameter", "buffer", "constant", "input"]
    name: str
    tensor: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model.

    Args:
        module: owns ``module.graph`` and the sub-graphs of higher-order operations.
        roles: placeholder name to its role.
        seen: layout of the model's result, and the forward's side effects.
        sizes: for each tensor of the call, the sizes that export has fixed; None where a size may vary.
        guard: takes the call's tensors and raises AssertionError if their sizes would take other branches of the model
            than the exported ones: besides fixed sizes, bounds (``x.size()[0] >= 4``) and relations.
    """

    module: torch.fx.GraphModule
    roles: dict[str, Role]
    seen: Seen
    sizes: tuple[tuple[int | None, ...], ...]
    guard: Callable[[Sequence[torch.Tensor]], None]


def export(model: torch.nn.Module, call: CallShape, tensors: list[torch.Tensor], roots: Roots = ()) -> Exported:
    """Export ``model`` for calls like this one, with every size dynamic where the model allows it.

    Args:
        model: the model.
        call: how it is called.
        tensors: the call's.
        roots: where the search for side effects of the forward starts; by default the model.

    Raises:
        CaptureError: the model cannot be exported, or export would lose a part of it.
        LazyBuffer: the forward sets a buffer that is None.
    """
    refuse_parts(model)
    adapter = ExportAdapter(model, call, roots)
    handled = sys.exc_info()[1]
    failures: list[Exception] = []
    for dims in (None, 1, 0):  # every size dynamic, the number of rows, none
        dynamic = {"leaves": tuple(dict.fromkeys(range(t.ndim)[:dims], torch.export.Dim.AUTO) for t in tensors)}
        with (
            _attributes_kept(model),
            _watch_modules(model) as running,
            _quiet(),
            DeferredSignals(inside_torch) as interrupts,
            StandingIn(interrupts.handle),  # it may raise where an operation may
        ):
            try:
                program = _with_traced_numbers(
                    partial(torch.export.export, adapter, tuple(tensors), strict=False, dynamic_shapes=dynamic)
                )
            except (CaptureError, LazyBuffer):
                raise
            except Exception as error:  # whatever the user's forward raises
                if hides_interrupt(error, handled):
                    raise KeyboardInterrupt from error
                failures.append(error)
                where = running.failed_at
                continue
        if adapter.seen.shape is None:
            raise _not_exportable(model, "", RuntimeError("the forward was not called"))
        open_regions(program.graph_module)
        substitute(program.graph_module)
        refuse_sparse(program.graph)
        refuse_vmap(program.graph)
        roles = _roles(program, model)
        return Exported(program.graph_module, roles, adapter.seen, _sizes(program), _guard(program))
    refuse_failing(model, call, tensors)
    raise _not_exportable(model, where, failures[-1]) from failures[-1]


def _with_traced_numbers(call: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """Call again for as long as a further ``int`` or ``float`` of a tensor is found that can be traced."""
    with TracedNumbers() as numbers:
        while True:
            try:
                return call()
            except Exception as error:  # whatever the user's forward raises
                if not numbers.add(error):
                    raise


_FILTERS: dict[str, Callable[[logging.LogRecord], bool]] = {
    # a long message on an inequality of sizes that torch cannot simplify, and checks as it is
    # and on sizes that are fixed, and on numbers read from tensors
    "torch.fx.experimental.symbolic_shapes": lambda r: (
        r.levelno >= logging.ERROR and not r.getMessage().startswith("Failed to reduce inequalities")
    ),
    # sizes of one, which are fixed
    "torch._export.non_strict_utils": lambda r: r.levelno >= logging.ERROR,
    # the traceback of an operation's error, which is raised as well
    "torch._subclasses.fake_tensor": lambda r: r.exc_info is None,
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's log messages and warnings about successful exports, and about errors that it raises anyway."""
    for name, accepts in _FILTERS.items():
        logging.getLogger(name).addFilter(accepts)
    try:
        silent = mock.patch.object(torch.export._trace, "print", lambda *_, **__: None, create=True)  # of failed graphs
        with silent, warnings.catch_warnings():  # of recurrent layers
            warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
            yield
    finally:
        for name, accepts in _FILTERS.items():
            logging.getLogger(name).removeFilter(accepts)


@contextmanager
def _attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restore every module's attributes afterwards: export replaces containers by copies.

    Without this, a list that two modules share would become two lists.
    """
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.update(attributes)
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]


class _Running:
    """The stack of modules whose forward runs, and the innermost one when something was raised."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.failed_at = ""

    def enter(self, name: str, _module: torch.nn.Module, _args: Any) -> None:
        self.stack.append(name)
        self.failed_at = name

    def leave(self, _module: torch.nn.Module, _args: Any, _result: Any) -> None:
        self.stack.pop()
        self.failed_at = self.stack[-1] if self.stack else ""


@contextmanager
def _watch_modules(model: torch.nn.Module) -> Iterator[_Running]:
    running, handles = _Running(), list[Any]()
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(running.enter, name)))
        handles.append(module.register_forward_hook(running.leave))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def refuse_failing(model: torch.nn.Module, call: CallShape, tensors: list[torch.Tensor]) -> None:
    """Call the model without export and refuse one that fails; does nothing if weights are on the meta device.

    Raises:
        CaptureError: the model's own forward fails on these tensors; naming the module and the line.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = call.unflatten(tensors)
    with _watch_modules(model) as running:
        try:
            torch.func.functional_call(model, buffers, args, kwargs)
        except Exception as error:  # whatever the user's forward raises
            raise _not_exportable(model, running.failed_at, error, in_eager=True) from error


def _not_exportable(model: torch.nn.Module, where: str, error: Exception, in_eager: bool = False) -> CaptureError:
    kind = type(model.get_submodule(where)).__name__
    module = f"module {where!r} ({kind}) of the model" if where else f"the model ({kind})"
    if isinstance(error, TypeError) and "forward()" in str(error):
        return CaptureError(
            f"the call of {module}",
            got=str(error).strip().splitlines()[0],
            expected="the arguments that its forward takes",
            remedy='Say how it is called: Job(inputs=lambda batch: ((batch["x"],), {})).',
        )
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    subject, got = f"{module}{users_line_of(error)}", f"{type(error).__name__}: {first_line[:300]}"
    if in_eager:
        return CaptureError(
            subject,
            got=got,
            expected="a forward that takes the job's first batch, with its row repeated if it has only one",
            remedy="It fails without Roundelay, too: call the model on such a batch by hand, and fix the model, the "
            "batch or Job(inputs=...).",
        )
    return CaptureError(
        subject,
        got=got,
        expected="a forward that torch.export can trace: no Python branch on tensor values, no call that leaves torch",
        remedy="Replace the branch by torch.where or torch.cond, move data-dependent code into the loss or the data "
        "loader, and check with torch.export.export(model, args, strict=False).",
    )


def _sizes(program: torch.export.ExportedProgram) -> tuple[tuple[int | None, ...], ...]:
    inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    return tuple(tuple(int(s) if is_concrete_int(s) else None for s in node.meta["val"].shape) for node in placeholders)


def _guard(program: torch.export.ExportedProgram) -> Callable[[Sequence[torch.Tensor]], None]:
    """The exported module's own check of its assumptions on sizes."""
    module = program.module()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node in module.graph.nodes:
        if node.op == "call_module" and str(node.target) == "_guards_fn":
            check, places = module.get_submodule(str(node.target)), [placeholders.index(arg) for arg in node.args]
            return lambda tensors: check(*(tensors[i] for i in places))
    return lambda tensors: None


def first_of_storages(model: torch.nn.Module) -> dict[str, str]:
    """Parameters that share the memory of an earlier one (``b.weight.data = a.weight.data``), with that one's name.

    Raises:
        CaptureError: two overlap in part.
    """
    first_names: dict[str, str] = {}
    spans: dict[int, list[tuple[int, int, str, torch.nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        if p.is_meta or p.layout is not torch.strided or not p.numel():
            continue
        start = int(p.storage_offset())
        stop = start + 1 + sum(int((size - 1) * stride) for size, stride in zip(p.size(), p.stride(), strict=True))
        others = spans.setdefault(p.untyped_storage().data_ptr(), [])
        for begin, end, other, tensor in others:
            if start < end and begin < stop:
                if (begin, tensor.size(), tensor.stride()) != (start, p.size(), p.stride()):
                    raise CaptureError(
                        f"parameters {other!r} and {name!r}",
                        got="two different views of the same memory, both trained",
                        expected="parameters each in memory of its own, or one parameter under two names",
                        remedy="Make one of them the parameter, and compute the other from it in forward: its view, or "
                        "its transpose.",
                    )
                first_names[name] = other
                break
        else:
            others.append((start, stop, name, p))
    return first_names


def _roles(program: torch.export.ExportedProgram, model: torch.nn.Module) -> dict[str, Role]:
    parameters = {id(p): name for name, p in model.named_parameters()}
    first = first_of_storages(model)
    buffers = {id(b): name for name, b in model.named_buffers()}
    roles: dict[str, Role] = {}
    inputs = 0
    for spec in program.graph_signature.input_specs:
        placeholder = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            roles[placeholder] = Role("input", str(inputs), None)
            inputs += 1
            continue
        target = str(spec.target).removeprefix(PREFIX)
        if spec.kind is InputKind.PARAMETER:
            name = parameters[id(model.get_parameter(target))]
            name = first.get(name, name)
            roles[placeholder] = Role("parameter", name, model.get_parameter(name))
        elif spec.kind is InputKind.BUFFER:
            buffer = model.get_buffer(target)
            roles[placeholder] = Role("buffer", buffers[id(buffer)], buffer)
        else:
            constant = program.constants[str(spec.target)]
            roles[placeholder] = Role("constant", target, constant if isinstance(constant, torch.Tensor) else None)
    return roles
