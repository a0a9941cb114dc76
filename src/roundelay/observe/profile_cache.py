"""Profiles kept between plans, so that the same job on the same machine is cut in the same way every time.

One JSON file per profile, named by a digest of all that it depends on and holding it in full. Whatever is wrong with
the file, it counts as absent: the profile is then measured anew. A folder that cannot be written costs nothing more.
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
"""Bytes of a file that nobody tries to read."""

Key = Mapping[str, Any]
"""What a profile depends on, as JSON can say it."""


def machine() -> dict[str, Any]:
    """What tells this machine from one with other speeds: its processor and the number of its cores."""
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
    """The profile in a file; None if there is none, or none that can be trusted.

    Args:
        path: its :func:`place`.
        key: what it must have been measured for.
        length: operations, the loss included.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("key") != dict(key):
        return None
    parts = [found.get(field.name) for field in fields(Profile)]
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
    """Write a profile where :func:`kept` finds it; whether that went well."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as file:
            file.write(strict_json({"format": FORMAT, "key": dict(key), **asdict(profile)}))
    except (OSError, RunError):
        return False
    return True
