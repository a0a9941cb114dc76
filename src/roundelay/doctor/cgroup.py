"""The limits that a control group sets: containers see all cores and all memory of their host, but may not use them.

Both versions of the kernel's interface (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/). A limit holds for
everything below it, so the tightest on the way to the root counts. Inside a container the way that the kernel tells may
lie outside what is mounted; what is there of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")

_NO_LIMIT = 1 << 62
"""Version 1 says "none" by a number near 2^63."""


def cpu_quota(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """Cores' worth of time that this process may use; None if there is no limit."""

    def quota(folder: Path) -> float | None:
        with suppress(OSError, ValueError):
            given, period = (folder / "cpu.max").read_text().split()
            return int(given) / int(period)  # "max": no number
        with suppress(OSError, ValueError):
            micros = int((folder / "cpu.cfs_quota_us").read_text())
            return micros / int((folder / "cpu.cfs_period_us").read_text()) if micros > 0 else None
        return None

    return _tightest(quota, "cpu", root, membership)


def memory_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes that this process and its siblings may use; None if there is no limit."""

    def limit(folder: Path) -> float | None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                found = int((folder / name).read_text())
                return found if found < _NO_LIMIT else None
        return None

    found = _tightest(limit, "memory", root, membership)
    return None if found is None else int(found)


def _tightest(read: Callable[[Path], float | None], controller: str, root: Path, membership: Path) -> float | None:
    found = [read(folder) for folder in _folders(controller, root, membership)]
    return min((one for one in found if one is not None), default=None)


def _folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The groups that this process is in, up to the root, of either version."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if number == "0" or controller in names.split(","):
            base = root if number == "0" else root / controller
            inner = base / path.lstrip("/")
            yield inner
            yield from (folder for folder in inner.parents if folder == base or base in folder.parents)
