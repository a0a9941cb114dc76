"""A cache of profiles, so that the same job on the same machine is cut in the same way every time.

One JSON file per profile, named by a digest of its key, which it also contains. A file with any fault counts as absent,
and the profile is measured again. A folder that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from roundelay.checkpoint.atomic_files import replacing_file, strict_json
from roundelay.cores import usable_cores
from roundelay.errors import RunError
from roundelay.ir.graph import Profile

_LONGEST = 64 << 20
"""Most bytes of a file that is read."""

Key = Mapping[str, Any]
"""Everything that a profile depends on, as JSON values."""


_Seconds = Annotated[float, msgspec.Meta(ge=0.0, lt=1e9)]


class _Entry(msgspec.Struct):
    """A file of the cache."""

    format: Literal[2]
    key: dict[str, Any]
    forward_s: tuple[_Seconds, ...]
    backward_s: tuple[_Seconds, ...]
    update_s: tuple[_Seconds, ...]
    add_s: tuple[_Seconds, ...]


def machine() -> dict[str, Any]:
    """The properties of this machine that determine its speed: its processor and number of cores."""
    return {"processor": _processor(), "cores": usable_cores()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def place(folder: Path, key: Key) -> Path:
    """The file of a profile in the cache's folder."""
    digest = hashlib.sha256(strict_json(dict(key), sort_keys=True).encode()).hexdigest()[:32]
    return folder / "profiles" / f"{digest}.json"


def kept(path: Path, key: Key, length: int) -> Profile | None:
    """Read a profile; None if the file is absent or not valid.

    Args:
        path: its :func:`place`.
        key: the key that it must have.
        length: number of operations, including the loss.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return None
        entry = msgspec.json.decode(path.read_bytes(), type=_Entry)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    parts = entry.forward_s, entry.backward_s, entry.update_s, entry.add_s
    if entry.key != dict(key) or any(len(part) != length for part in parts):
        return None
    return Profile(*parts)


def keep(path: Path, key: Key, profile: Profile) -> bool:
    """Write a profile for :func:`kept` to read; returns whether that succeeded."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as file:
            file.write(strict_json({"format": 2, "key": dict(key), **asdict(profile)}))
    except (OSError, RunError):
        return False
    return True
