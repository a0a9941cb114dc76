"""What a checkpoint holds, as digests whose names do not depend on the layout of its files.

=========================  =====================================================
``weight NAME``            a parameter, by its first name in the model
``buffer NAME``            a buffer, likewise
``average NAME``           the moving average of a parameter
``optimizer NAME ENTRY``   one entry of the optimizer's state of a parameter
``loss scale``             a dynamic loss scale, and the finite batches behind it
=========================  =====================================================

The tensors are read without torch and without Roundelay: a safetensors file is a length, a table in JSON, and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Digests = dict[str, str]
AVERAGE = "roundelay.ema"


class NoStateError(Exception):
    """A folder holds no checkpoint of a format that is known here."""


def final_state(folder: Path) -> Digests:
    """Digests of all that a checkpoint says of the training, by names as above.

    Args:
        folder: a checkpoint, or a run's folder that holds one as ``checkpoint``.

    Raises:
        NoStateError: no known format lies there. A new one gets a function of its own in :data:`FORMATS`.
    """
    inner = folder / "checkpoint"
    place = inner if inner.is_dir() else folder
    for read in FORMATS:
        found = read(place)
        if found is not None:
            return found
    there = ", ".join(sorted(entry.name for entry in place.iterdir())) if place.is_dir() else "no folder"
    raise NoStateError(f"{place}: no checkpoint of a known format ({there or 'nothing in it'})")


def _one_file_of_each_kind(folder: Path) -> Digests | None:
    """Formats 1 to 3: ``model.safetensors``, ``optimizer.safetensors``, and the rest in ``checkpoint.json``."""
    manifest = _json(folder / "checkpoint.json")
    if manifest.get("kind") != "roundelay checkpoint" or manifest.get("format") not in (1, 2, 3):
        return None
    content = manifest["content"] if manifest["format"] == 3 else manifest
    model, states = tensors(folder / "model.safetensors"), tensors(folder / "optimizer.safetensors")
    found = {f"weight {name}": model[name] for name in content["parameters"]}
    found |= {f"buffer {name}": model[name] for name in content["buffers"]}
    for parameter, state in content["optimizer"].items():
        for entry, value in state.items():
            stored = isinstance(value, dict) and "tensor" in value
            found[_entry(parameter, entry)] = states[value["tensor"]] if stored else number(value)
    return found | {"loss scale": number(content.get("facts", content).get("loss_scale"))}


def _one_file_of_each_holder(folder: Path) -> Digests | None:
    """Format 4: a file for each holder, which has its parameters whole, and ``checkpoint.json``."""
    manifest = _json(folder / "checkpoint.json")
    if manifest.get("kind") != "roundelay checkpoint" or manifest.get("format") != 4:
        return None
    found: Digests = {}
    scale = None
    for holder in manifest["content"]["holders"]:
        held, table = tensors(folder / holder["file"]), holder["table"]
        found |= {f"weight {name}": held[name] for name in table["parameters"]}
        found |= {f"buffer {name}": held[name] for name in table["buffers"] if f"buffer {name}" not in found}
        scale = table["loss_scale"] or scale
        for parameter, state in table["optimizer"].items():
            for entry, value in state.items():
                stored = isinstance(value, dict) and "tensor" in value
                found.setdefault(_entry(parameter, entry), held[value["tensor"]] if stored else number(value))
    return found | {"loss scale": number(scale)}


FORMATS: tuple[Callable[[Path], Digests | None], ...] = (_one_file_of_each_kind, _one_file_of_each_holder)
"""For each layout what reads it; None where another one lies there."""


def _entry(parameter: str, entry: str) -> str:
    return f"average {parameter}" if entry == AVERAGE else f"optimizer {parameter} {entry}"


def _json(file: Path) -> Mapping[str, Any]:
    try:
        read = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def tensors(file: Path) -> Digests:
    """The digest of dtype, shape and bytes of every tensor of a safetensors file, by its name."""
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = _digest(f"{entry['dtype']} {entry['shape']}", data[begin + start : begin + end])
    return found


def number(value: object) -> str:
    """The digest of a value that is no tensor; floats differ if any bit of them does."""
    return _digest(json.dumps(value, sort_keys=True), b"")


def _digest(label: str, data: bytes) -> str:
    return hashlib.sha256(label.encode() + b"\n" + data).hexdigest()
