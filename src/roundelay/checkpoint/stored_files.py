"""The files of a checkpoint: one for each holder's state, and a manifest that joins them.

A holder writes its file at any time, under a name that no other has. The manifest is replaced last, by one ``rename``:
before it the old checkpoint is complete, after it the new one. Files that no manifest names are removed afterwards, or,
if the process was killed, at the next run's start.

The manifest is JSON and holds the SHA-256 of each file and of itself; nothing is ever unpickled. A float that is not
finite is written as ``NaN`` or ``Infinity``, as Python's ``json`` reads and writes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roundelay.checkpoint.atomic_files import replacing_file, sync
from roundelay.checkpoint.held_state import UNUSED, HeldState, StateTable, encode
from roundelay.errors import CheckpointError, RunError

FORMAT = 4
KIND = "roundelay checkpoint"
MANIFEST = "checkpoint.json"

_OWN = re.compile(r"\.?(stage-\d+\.worker-\d+|unused)\.update-(?P<updates>\d+)(\.\d+)?\.safetensors(\.part)?")
_UNFINISHED = re.compile(rf"\.probe-[0-9a-f]+|\.{re.escape(MANIFEST)}\.part|\.tmp\w{{6}}")
"""Files that a killed process may leave beside those of the holders; the last kind is safetensors' own."""

_TRIES = 10
"""How often a reader tries again because a save replaced the checkpoint meanwhile."""


class StoredState(msgspec.Struct, forbid_unknown_fields=True):
    """A holder's state whose tensors are in a file.

    Args:
        file: its name in the checkpoint's folder.
        sha256: of its bytes.
        table: the rest of the state.
    """

    file: str
    sha256: str
    table: StateTable


def write_state(folder: Path, held: HeldState, worker: int, updates: int) -> StoredState:
    """Write a holder's state into a file of its own, on disk when this returns; it belongs to no checkpoint yet.

    Args:
        folder: of the checkpoint; created if it is missing.
        held: the state.
        worker: number of the worker that has it.
        updates: made before it.

    Raises:
        CheckpointError: a value cannot be stored.
        OSError, SafetensorError: the file cannot be written.
    """
    table, tensors = encode(held)
    holder = "unused" if held.stage == UNUSED else f"stage-{held.stage}.worker-{worker}"
    folder.mkdir(parents=True, exist_ok=True)
    file = _reserve(folder, f"{holder}.update-{updates}")
    part = file.with_name(f".{file.name}.part")
    try:
        _write_tensors(part, tensors)
        part.chmod(file.stat().st_mode & 0o777)  # safetensors lets only the owner read
        with part.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            os.fsync(written.fileno())
        part.rename(file)
    except BaseException:
        for path in (part, file):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    return StoredState(file.name, digest, table)


def unfinished_bytes(folder: Path) -> int:
    """How many bytes are written of files that are not complete, by this process or others."""
    total = 0
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(FileNotFoundError):
                total += path.stat().st_size if path.name.startswith(".") else 0
    return total


def _reserve(folder: Path, stem: str) -> Path:
    """Create a file under a new name: the complete checkpoint may have one of the same update, of an earlier run."""
    for number in itertools.count():
        file = folder / f"{stem}{f'.{number}' if number else ''}.safetensors"
        with suppress(FileExistsError):
            file.touch(exist_ok=False)
            return file
    raise AssertionError


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file(_separate(tensors), file)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            "a tensor of the training state",
            got=f"one that cannot be stored ({error})",
            expected="dense tensors of a dtype that safetensors knows",
            remedy="Use another dtype or layout for this parameter, buffer or state.",
        ) from error


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


def write_manifest(folder: Path, content: Mapping[str, Any], files: Sequence[str], updates: int) -> None:
    """Replace the manifest, and remove the files of earlier checkpoints.

    Args:
        folder: of the checkpoint.
        content: what the manifest says, as JSON values.
        files: those that it names; they are on disk.
        updates: made before this checkpoint; the files of later ones may be being written.

    Raises:
        RunError, OSError: it cannot be written; the old checkpoint is intact.
    """

    def confirm() -> None:
        if gone := [name for name in files if not (folder / name).is_file()]:
            raise RunError(
                f"checkpoint {folder}",
                got=f"no {gone[0]}, which another run has removed",
                expected="one run at a time that writes into this folder",
                remedy="Save to another place.",
            )

    document = {"kind": KIND, "format": FORMAT, "content": content}
    before = named_files(folder)
    with replacing_file(folder / MANIFEST, confirm) as file:
        sync(folder)
        file.write(json.dumps(document | {"sha256": _digest(document)}, indent=1) + "\n")
    sync(folder)
    _remove(folder, lambda name, of: name not in files and (name in before or of <= updates))


def remove_leftovers(folder: Path) -> None:
    """Remove files of interrupted checkpoints: those of ours that the manifest does not name."""
    with suppress(OSError):
        named = named_files(folder)
        _remove(folder, lambda name, _: name not in named)
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink()


def remove_updates(folder: Path, updates: int) -> None:
    """Remove the files of a checkpoint that could not be completed, unless the manifest names them."""
    with suppress(OSError):
        named = named_files(folder)
        _remove(folder, lambda name, of: of == updates and name not in named)


def _remove(folder: Path, which: Callable[[str, int], bool]) -> None:
    with suppress(OSError):  # leftovers are harmless, and a later call removes them
        for path in folder.iterdir():
            own = _OWN.fullmatch(path.name)
            if own is not None and which(path.name, int(own["updates"])):
                path.unlink()


def named_files(folder: Path) -> set[str]:
    """The files that the manifest names; none if there is no manifest, or one that names none.

    Raises:
        OSError: there is one that cannot be read now.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())["content"]
        return {holder["file"] for holder in content["holders"]}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return set()


def holds_only_own(folder: Path) -> bool:
    """Whether nothing but files of checkpoints is in the folder, complete or not."""
    return all(name == MANIFEST or _OWN.fullmatch(name) or _UNFINISHED.fullmatch(name) for name in os.listdir(folder))


def make_probe(folder: Path) -> Path:
    """Make a file, in a folder that is made if it is missing, by which another process finds out whether it sees it.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe-{secrets.token_hex(8)}"
    probe.touch()
    return probe


def is_checkpoint(folder: Path) -> bool:
    """Whether a complete checkpoint is in the folder; it may be damaged."""
    return (folder / MANIFEST).is_file()


def inside_run(path: Path) -> Path:
    """The checkpoint's folder: ``path`` itself, or ``checkpoint`` in it if it is a run's folder."""
    inner = path / "checkpoint"
    return inner if is_checkpoint(inner) else path


def read(path: Path) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    """Read the manifest's content, and the tensors of every file that it names, by the file's name.

    The tensors are mapped: a page of the file is read when it is first used. A save that replaces the checkpoint
    removes the files' names only.

    Raises:
        CheckpointError: they are missing, damaged, no checkpoint, or of another format.
    """
    return _read(path, _TRIES)


def _read(path: Path, tries: int) -> tuple[Any, dict[str, dict[str, Tensor]]]:
    text = _manifest_bytes(path)
    try:
        content = _content(path, text)
        digests = _digests(path, content)
        return content, {name: _tensors(path, name, digest) for name, digest in digests.items()}
    except CheckpointError:
        if tries == 1 or _manifest_bytes(path) == text:
            raise
    return _read(path, tries - 1)


def _manifest_bytes(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        got = f"no {MANIFEST} in it" if path.exists() else "nothing at this place"
        raise _not_a_checkpoint(path, got) from error
    except OSError as error:
        raise _not_a_checkpoint(path, f"a {MANIFEST} that cannot be read ({error.strerror})") from error


def _content(path: Path, text: bytes) -> Any:
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
    if document.pop("sha256", None) != _digest(document):
        raise damaged(path, f"a {MANIFEST} whose content does not match its SHA-256")
    return document["content"]


def _digests(path: Path, content: Any) -> dict[str, str]:
    """SHA-256 of each file by its name, which leads nowhere else."""
    try:
        digests = {holder["file"]: holder["sha256"] for holder in content["holders"]}
        if all(_OWN.fullmatch(name) for name in digests):
            return digests
    except (KeyError, TypeError):
        pass
    raise damaged(path, f"a {MANIFEST} that does not name the files of its holders")


def _tensors(path: Path, name: str, digest: str) -> dict[str, Tensor]:
    file = path / name
    try:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != digest:
            raise damaged(path, f"a {name} whose bytes do not match its SHA-256")
        with safe_open(str(file), "pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118, it is no dict
    except FileNotFoundError as error:
        raise damaged(path, f"no {name}") from error
    except OSError as error:
        raise damaged(path, f"a {name} that cannot be read ({error.strerror})") from error
    except RuntimeError as error:  # torch maps the file: it was removed since its digest was taken
        raise damaged(path, f"a {name} that cannot be mapped ({error})") from error
    except SafetensorError as error:
        raise damaged(path, f"a {name} that holds no tensors ({error})") from error


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
        expected=f"a folder with {MANIFEST} and the files that it names",
        remedy="Name the folder of a checkpoint.",
    )
