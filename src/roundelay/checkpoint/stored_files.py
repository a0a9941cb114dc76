"""The files of a checkpoint, written with digests and verified when read.

The manifest is JSON and holds the SHA-256 of each tensor file and of the rest of itself; nothing is ever unpickled.
A float that is not finite is written as ``NaN`` or ``Infinity``, as Python's ``json`` reads and writes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save_file
from torch import Tensor

from roundelay.checkpoint.atomic_files import present
from roundelay.errors import CheckpointError

FORMAT = 3
KIND = "roundelay checkpoint"

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
FLIGHT = "flight.safetensors"
MANIFEST = "checkpoint.json"
FILES = (MODEL, OPTIMIZER, FLIGHT, MANIFEST)

_TRIES = 10
"""How often a reader tries again because a save replaced the checkpoint meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredFiles:
    """The content of the files.

    Args:
        content: what the manifest says of the checkpoint, as JSON values.
        model: tensors of ``model.safetensors``.
        optimizer: tensors of ``optimizer.safetensors``.
        flight: tensors of ``flight.safetensors``; None if there is no such file.
    """

    content: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    flight: dict[str, Tensor] | None = None


def write(folder: Path, stored: StoredFiles) -> None:
    """Write the files into an empty folder.

    Raises:
        CheckpointError: safetensors does not know a tensor's dtype or layout.
        OSError, SafetensorError: the folder cannot be written.
    """
    digests: dict[str, str] = {}
    for name, tensors in ((MODEL, stored.model), (OPTIMIZER, stored.optimizer), (FLIGHT, stored.flight)):
        if tensors is None:
            continue
        _write_tensors(folder / name, tensors)
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    document = {"kind": KIND, "format": FORMAT, "content": stored.content, "sha256": digests}
    document["sha256"] = digests | {MANIFEST: _digest(document)}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name in digests:  # safetensors lets only the owner read; all files get the manifest's permissions
        (folder / name).chmod((folder / MANIFEST).stat().st_mode & 0o777)


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file(_separate(tensors), file)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{file.name} of a checkpoint",
            got=f"a tensor that cannot be stored ({error})",
            expected="dense tensors of a dtype that safetensors knows",
            remedy="Use another dtype or layout for this parameter, buffer or state.",
        ) from error


def read(path: Path) -> StoredFiles:
    """Read the files at ``path``, all of one save even if another replaces them meanwhile.

    Raises:
        CheckpointError: they are missing, damaged, no checkpoint, or of a newer format.
    """
    return _read(path, path.resolve(), _TRIES)


def _read(path: Path, place: Path, tries: int) -> StoredFiles:
    text = _bytes(path, present(place) / MANIFEST)
    try:
        manifest = _manifest(path, place, text)
        model, optimizer = (_tensors(path, present(place) / name, manifest) for name in (MODEL, OPTIMIZER))
        has_flight = FLIGHT in manifest["sha256"]
        return StoredFiles(
            manifest["content"],
            model,
            optimizer,
            _tensors(path, present(place) / FLIGHT, manifest) if has_flight else None,
        )
    except CheckpointError:
        if tries == 1 or _bytes(path, present(place) / MANIFEST) == text:
            raise
    return _read(path, place, tries - 1)


def _manifest(path: Path, place: Path, text: bytes | None) -> dict[str, Any]:
    if text is None:
        raise _not_a_checkpoint(path, f"no {MANIFEST} in it" if place.exists() else "nothing at this place")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise damaged(path, f"a {MANIFEST} that is no JSON ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND or type(document.get("format")) is not int:
        raise _not_a_checkpoint(path, f"another program's {MANIFEST}")
    if document["format"] != FORMAT:
        which = "a newer Roundelay" if document["format"] > FORMAT else "the Roundelay that wrote it"
        raise CheckpointError(
            f"checkpoint {path}",
            got=f"format {document['format']}",
            expected=f"format {FORMAT}",
            remedy=f"Load it with {which}.",
        )
    digests = document.get("sha256")
    rest = {name: digest for name, digest in digests.items() if name != MANIFEST} if isinstance(digests, dict) else {}
    if not isinstance(digests, dict) or digests.get(MANIFEST) != _digest(document | {"sha256": rest}):
        raise damaged(path, f"a {MANIFEST} whose content does not match its SHA-256")
    return document


def _tensors(path: Path, file: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    data = _bytes(path, file)
    if data is None:
        raise damaged(path, f"no {file.name}")
    if hashlib.sha256(data).hexdigest() != manifest["sha256"].get(file.name):
        raise damaged(path, f"a {file.name} whose bytes do not match its SHA-256")
    try:
        return tensors_of(data)
    except SafetensorError as error:
        raise damaged(path, f"a {file.name} that holds no tensors ({error})") from error


def _bytes(path: Path, file: Path) -> bytes | None:
    """The file's bytes; None if it does not exist. It is not mapped, so that a save may delete it."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _not_a_checkpoint(path, f"a {file.name} that cannot be read ({error.strerror})") from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors contiguous on the CPU, no two in one storage: safetensors refuses those that overlap."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in storages:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        separate[name] = value
    return separate


def _digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def damaged(path: Path, got: str) -> CheckpointError:
    """The error for files that differ from what a save wrote."""
    return CheckpointError(
        f"checkpoint {path}",
        got=got,
        expected="the files that a save wrote, unchanged",
        remedy="Copy it again from its origin, or use another checkpoint.",
    )


def _not_a_checkpoint(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}",
        got=got,
        expected=f"a folder with {MODEL}, {OPTIMIZER} and {MANIFEST}",
        remedy="Name the folder of a checkpoint.",
    )
