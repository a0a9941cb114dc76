"""A cache of profiles, so that the same job on the same machine is cut in the same way every time.

One JSON file per profile, named by a digest of its key, which it also contains. A file with any fault counts as absent,
and the profile is measured again. A folder that cannot be written is no error.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from roundelay.checkpoint.atomic_files import replacing_file, strict_json
from roundelay.errors import RunError
from roundelay.ir.graph import Profile

FORMAT = 1

_LONGEST = 64 << 20
"""Most bytes of a file that is read."""

Key = Mapping[str, Any]
"""Everything that a profile depends on, as JSON values."""


def machine() -> dict[str, Any]:
    """The properties of this machine that determine its speed: its processor and number of cores."""
    return {"processor": _processor(), "cores": os.cpu_count() or 1}


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
        entry = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("format") != FORMAT or entry.get("key") != dict(key):
        return None
    parts = [entry.get(field.name) for field in fields(Profile)]
    if not all(_seconds(part, length) for part in parts):
        return None
    return Profile(*(tuple(map(float, part)) for part in parts if part is not None))


def _seconds(part: Any, length: int) -> bool:
    return (
        isinstance(part, list)
        and len(part) == length
        and all(type(number) in (int, float) and 0 <= number < 1e9 and math.isfinite(number) for number in part)
    )


def keep(path: Path, key: Key, profile: Profile) -> bool:
    """Write a profile for :func:`kept` to read; returns whether that succeeded."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as file:
            file.write(strict_json({"format": FORMAT, "key": dict(key), **asdict(profile)}))
    except (OSError, RunError):
        return False
    return True
