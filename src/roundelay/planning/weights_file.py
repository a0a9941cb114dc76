"""Load weights lazily from a file, so that no worker holds more than its stage; and load checkpoints into a model.

A model is built with :func:`empty_weights`, which leaves its parameters on the meta device, without memory; its job
names the file. :func:`fill` maps the file into memory: a page is read when an operator first touches it, may be evicted
again, and is shared by all processes. A worker then copies only the parameters of its own stage.

The process that started the workers gathers the whole model for evaluations, and at the end if it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import load_into
from roundelay.checkpoint.stored_files import inside_run, is_checkpoint
from roundelay.errors import JobError

_SUFFIX = ".safetensors"


@contextmanager
def empty_weights() -> Iterator[None]:
    """Create the parameters of modules on the meta device within the block; buffers keep their values.

    ``torch.device("meta")`` would leave buffers empty too, whose values are often in no file.
    """
    register = torch.nn.Module.register_parameter

    def empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill(model: torch.nn.Module, path: Path) -> None:
    """Set every parameter, and every stored buffer, to its value in the file; tied parameters stay tied.

    Args:
        model: built with :func:`empty_weights`, or an ordinary one; it keeps its dtypes.
        path: a safetensors file, a folder of them as Hugging Face writes it, or a checkpoint or run folder.

    Raises:
        JobError: the file cannot be read, a tensor is missing, unexpected, or of another shape.
        CheckpointError: it is a checkpoint, and damaged.
    """
    stored = _stored(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    _check(path, model, stored, parameters | buffers)
    replaced: dict[int, Any] = {}
    for name, old in (parameters | buffers).items():
        if name in stored and id(old) not in replaced:
            value = stored[name].to(old.dtype)
            replaced[id(old)] = torch.nn.Parameter(value, old.requires_grad) if name in parameters else value
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for key, tensor in own.items():
                if tensor is not None and id(tensor) in replaced:
                    own[key] = replaced[id(tensor)]


def check_filled(model: torch.nn.Module) -> None:
    """Check that every parameter and buffer has values.

    Raises:
        JobError: naming the first one on the meta device.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise JobError(
                f"Job(model=...): {name!r}",
                got="a tensor on the meta device, without values",
                expected="values, in the model or in the file of Job(weights=...)",
                remedy="Give the job the safetensors file, and build the model with `roundelay.empty_weights()`, "
                "which leaves buffers real.",
            )


def _stored(path: Path) -> dict[str, torch.Tensor]:
    if is_checkpoint(inside_run(path)):
        checkpoint = store.load(inside_run(path))
        return checkpoint.parameters | checkpoint.buffers
    files = sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            with safe_open(str(file), "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise _unusable(path, str(error)) from error
    if not tensors:
        raise _unusable(path, f"no {_SUFFIX} file with tensors in it")
    return tensors


def _check(path: Path, model: torch.nn.Module, stored: dict[str, Any], own: dict[str, torch.Tensor]) -> None:
    names = {id(tensor) for name, tensor in own.items() if name in stored}
    for name, tensor in model.named_parameters():
        if id(tensor) not in names:
            raise _unusable(path, f"no value for {name!r}, which the model has")
    for name, value in stored.items():
        if name not in own:
            raise _unusable(path, f"a value for {name!r}, which the model has not")
        if value.shape != own[name].shape:
            shapes = f"shape {tuple(value.shape)} for {name!r}, which has {tuple(own[name].shape)} in the model"
            raise _unusable(path, shapes)


def _unusable(path: Path, got: str) -> JobError:
    return JobError(
        f"Job(weights={str(path)!r})",
        got=got,
        expected="one value for each parameter of the model, by its name in `state_dict()`",
        remedy="Name a file with the weights of this model.",
    )


def load(model: torch.nn.Module, path: str | Path, *, averaged: bool = False) -> torch.nn.Module:
    """Load a checkpoint's weights and buffers into a plain ``model``.

    Args:
        model: of the class and sizes that were trained.
        path: a checkpoint folder, or a run folder that contains one.
        averaged: load the moving averages (``ema``) of the weights instead. With an optimizer that has an ``eval()``
            (schedule-free), the weights are always loaded as ``eval()`` sets them.

    Raises:
        CheckpointError: it is missing, damaged, or of another model; or it has no averages.
    """
    return load_into(model, inside_run(Path(path)), averaged=averaged)
