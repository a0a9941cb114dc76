"""Parses the environment variables that Roundelay reads.

``ROUNDELAY_DEBUG``: 0 (default) nothing; 1 the plan and tracebacks; 2 also timings; 3 also programs; 4 also events.

``ROUNDELAY_MALLOC``: ``keep`` leaves the C library's settings for memory alone; otherwise see :func:`better_malloc`.

``ROUNDELAY_CACHE``: where measured profiles are kept, or ``none``; otherwise see :func:`cache_folder`.

``ROUNDELAY_CORES``: how many cores this machine counts as having; otherwise see :mod:`roundelay.cores`.

``ROUNDELAY_RUNS``: parent of the folders of runs from Python, or ``none``; otherwise see :func:`runs_folder`.

``OMP_NUM_THREADS``: torch's intra-op threads, as the person has set them; see :func:`omp_threads`.

``RANK``, ``WORLD_SIZE`` and others are set by a launcher such as torchrun: see :mod:`roundelay.detect_launcher`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from roundelay import detect_launcher
from roundelay.detect_launcher import LEADER, Launched
from roundelay.errors import UsageError

VARIABLES = {
    "ROUNDELAY_CACHE": "folder of what is kept between runs, such as measured profiles; `none` keeps nothing",
    "ROUNDELAY_CORES": "how many cores this machine counts as having",
    "ROUNDELAY_DEBUG": "shows on stderr what a run is made of, from 0 (nothing) to 4 (every event)",
    "ROUNDELAY_MALLOC": "`keep` leaves the C library's settings for memory alone",
    "ROUNDELAY_RUNS": "parent of the folders of runs by `roundelay.train()`, `runs` by default; `none` writes none",
}
"""Roundelay's own variables, and what each does."""

LEVELS = {
    "0": "nothing",
    "1": "the plan, and tracebacks",
    "2": "also timings",
    "3": "also programs",
    "4": "also events",
}


def runs_folder() -> Path | None:
    """Where ``roundelay.train`` makes a run's folder by default; None: it makes none."""
    text = os.environ.get("ROUNDELAY_RUNS") or "runs"
    return None if text == "none" else Path(text)


def level() -> int:
    """The debug level, 0 to 4.

    Raises:
        UsageError: ``ROUNDELAY_DEBUG`` has another value.
    """
    text = os.environ.get("ROUNDELAY_DEBUG", "0")
    if text not in LEVELS:
        good = ", ".join(f"{key} ({meaning})" for key, meaning in LEVELS.items())
        raise _unknown("ROUNDELAY_DEBUG", text, f"one of {good}")
    return int(text)


def check_malloc() -> None:
    """Reject an unknown value of ``ROUNDELAY_MALLOC``.

    Raises:
        UsageError: it is set to something other than :data:`KEEP`.
    """
    text = os.environ.get("ROUNDELAY_MALLOC") or KEEP
    if text != KEEP:
        raise _unknown("ROUNDELAY_MALLOC", text, f"{KEEP} (the C library's settings for memory as they are)")


def cores() -> int | None:
    """The number of cores that is declared; None if none is.

    Raises:
        UsageError: ``ROUNDELAY_CORES`` is no whole number from 1 on.
    """
    text = os.environ.get("ROUNDELAY_CORES")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_CORES):
        raise _unknown("ROUNDELAY_CORES", text, f"a whole number from 1 to {_MOST_CORES}")
    return int(text)


_MOST_CORES = 4096


def omp_threads(environment: Mapping[str, str] | None = None) -> int | None:
    """``OMP_NUM_THREADS``; None if it is no number, or the 1 that torchrun sets where the person has set nothing."""
    now = os.environ if environment is None else environment
    text = now.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_CORES):
        return None
    return None if text == "1" and detect_launcher.is_torchrun(now) else int(text)


def _unknown(name: str, text: str, expected: str) -> UsageError:
    return UsageError(
        f"environment variable {name}", got=repr(text), expected=expected, remedy="Set it so, or unset it."
    )


KEEP = "keep"
"""The one value of ``ROUNDELAY_MALLOC``."""

MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""glibc settings that keep freed memory, as every micro-batch allocates the same again; read when a program starts.

32 MiB is the largest threshold that glibc accepts on 64 bits; a larger one is ignored.
"""


def better_malloc(environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The environment with which to restart this program; None if no restart is needed.

    None where the C library is not glibc, or where the user has set any of :data:`MALLOC` or ``ROUNDELAY_MALLOC=keep``.
    """
    now = os.environ if environment is None else environment
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or now.get("ROUNDELAY_MALLOC") == KEEP:
        return None
    return None if set(MALLOC) & set(now) else {**now, **MALLOC}


def malloc_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of :data:`MALLOC` that are set in this process; they affect measured times."""
    now = os.environ if environment is None else environment
    return {name: now[name] for name in MALLOC if name in now}


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """The folder of what is kept between runs; None if nothing may be kept, or there is no home folder.

    ``ROUNDELAY_CACHE`` names it, or is ``none``; by default it is ``roundelay`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    now = os.environ if environment is None else environment
    named, shared, home = (now.get(name, "") for name in ("ROUNDELAY_CACHE", "XDG_CACHE_HOME", "HOME"))
    if named:
        return None if named == "none" else Path(named)
    if os.path.isabs(shared):  # the XDG specification ignores relative paths
        return Path(shared) / "roundelay"
    return Path(home) / ".cache" / "roundelay" if os.path.isabs(home) else None


def of_process(given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that this one starts.

    Args:
        given: what it is told.
        defaults: further variables, where this process has none.
    """
    return {**defaults, **os.environ, **given}


def set_default(name: str, value: str) -> None:
    """Set a variable of this process that a library reads, unless it is set."""
    os.environ.setdefault(name, value)


def put_all(values: Mapping[str, str]) -> bool:
    """Set variables of this process that a library reads when it is loaded; return whether that changes anything."""
    changed = any(os.environ.get(name) != value for name, value in values.items())
    os.environ.update(values)
    return changed


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that are set and affect a run: all that begin with ``ROUNDELAY_``, and a few of libraries and tools."""
    now = os.environ if environment is None else environment
    others = {*MALLOC, "GLOO_SOCKET_IFNAME", "CXX"}
    return {name: now[name] for name in sorted(now) if name.startswith("ROUNDELAY_") or name in others}


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """Return how a launcher started this process; None if it was started by hand.

    Raises:
        UsageError: the launcher's variables are incomplete.
    """
    return detect_launcher.launched(os.environ if environment is None else environment)


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process."""
    return detect_launcher.is_launched(os.environ if environment is None else environment)


def processes_here(environment: Mapping[str, str] | None = None) -> int:
    """How many of a launcher's processes share this host; 1 if none started this process."""
    return detect_launcher.processes_here(os.environ if environment is None else environment)


def own_processors(environment: Mapping[str, str] | None = None) -> int | None:
    """How many processors a launcher has given this process for itself; None if it does not say."""
    return detect_launcher.own_processors(os.environ if environment is None else environment)


def launched_as(environment: Mapping[str, str] | None = None) -> str | None:
    """The name of this process among a launcher's, such as "worker 1"; None if it was started by hand."""
    number = detect_launcher.rank_of(os.environ if environment is None else environment)
    return None if number is None else f"worker {number}"


def by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher is torchrun, which starts and ends its processes as its own children."""
    return detect_launcher.is_torchrun(os.environ if environment is None else environment)


def leads(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process prints results: it was started by hand, or is the launcher's leader (rank 0)."""
    return detect_launcher.rank_of(os.environ if environment is None else environment) in (None, str(LEADER))
