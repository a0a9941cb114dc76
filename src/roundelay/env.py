"""Every environment variable that Roundelay reads, parsed once.

``ROUNDELAY_DEBUG``: 0 (default) nothing; 1 the plan and tracebacks; 2 also timings; 3 also programs; 4 also events.

``ROUNDELAY_MALLOC``: ``keep`` leaves the C library's settings for memory alone; otherwise see :func:`better_malloc`.

``ROUNDELAY_CACHE``: where measured profiles are kept, or ``none``; otherwise see :func:`cache_folder`.

``RANK``, ``WORLD_SIZE`` and others are set by a launcher such as torchrun: see :mod:`roundelay.launchers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from roundelay import launchers
from roundelay.errors import UsageError
from roundelay.launchers import LEADER, Launched

VARIABLES = {
    "ROUNDELAY_CACHE": "folder of what is kept between runs, such as measured profiles; `none` keeps nothing",
    "ROUNDELAY_DEBUG": "shows on stderr what a run is made of, from 0 (nothing) to 4 (every event)",
    "ROUNDELAY_MALLOC": "`keep` leaves the C library's settings for memory alone",
}
"""Roundelay's own variables, and what each does."""

LEVELS = {
    "0": "nothing",
    "1": "the plan, and tracebacks",
    "2": "also timings",
    "3": "also programs",
    "4": "also events",
}


def level() -> int:
    """The debug level, 0 to 4.

    Raises:
        UsageError: ``ROUNDELAY_DEBUG`` holds something else.
    """
    text = os.environ.get("ROUNDELAY_DEBUG", "0")
    if text not in LEVELS:
        good = ", ".join(f"{key} ({meaning})" for key, meaning in LEVELS.items())
        raise _unknown("ROUNDELAY_DEBUG", text, f"one of {good}")
    return int(text)


def check_malloc() -> None:
    """Refuse what :func:`better_malloc` knows nothing of.

    Raises:
        UsageError: ``ROUNDELAY_MALLOC`` holds something else than :data:`KEEP`.
    """
    text = os.environ.get("ROUNDELAY_MALLOC") or KEEP
    if text != KEEP:
        raise _unknown("ROUNDELAY_MALLOC", text, f"{KEEP} (the C library's settings for memory as they are)")


def _unknown(name: str, text: str, expected: str) -> UsageError:
    return UsageError(
        f"environment variable {name}", got=repr(text), expected=expected, remedy="Set it so, or unset it."
    )


KEEP = "keep"
"""What ``ROUNDELAY_MALLOC`` may say."""

MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""What glibc is told: keep freed memory, as every micro-batch asks for the same again. It is read at a program's start.

32 MiB is the largest threshold that glibc takes on 64 bits; a larger one is ignored.
"""


def better_malloc(environment: Mapping[str, str] | None = None) -> dict[str, str] | None:
    """The environment with which to start this program anew; None if it should go on as it is.

    It goes on where the C library is not glibc, where the person has set any of :data:`MALLOC`, or has said
    ``ROUNDELAY_MALLOC=keep``.
    """
    now = os.environ if environment is None else environment
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or now.get("ROUNDELAY_MALLOC") == KEEP:
        return None
    return None if set(MALLOC) & set(now) else {**now, **MALLOC}


def malloc_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of :data:`MALLOC` that hold for this process: what computes, computes faster or slower with them."""
    now = os.environ if environment is None else environment
    return {name: now[name] for name in MALLOC if name in now}


def cache_folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """What is worth keeping between runs lies here; None if nothing may be kept, or there is no home to keep it in.

    ``ROUNDELAY_CACHE`` names it, or says ``none``; by default it is ``roundelay`` in ``XDG_CACHE_HOME``, or in
    ``.cache`` at home.
    """
    now = os.environ if environment is None else environment
    said, shared, home = (now.get(name, "") for name in ("ROUNDELAY_CACHE", "XDG_CACHE_HOME", "HOME"))
    if said:
        return None if said == "none" else Path(said)
    if os.path.isabs(shared):  # the standard has others ignored
        return Path(shared) / "roundelay"
    return Path(home) / ".cache" / "roundelay" if os.path.isabs(home) else None


def settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that are set and matter to a run: Roundelay's own, known or not, and a few of what it calls."""
    now = os.environ if environment is None else environment
    others = {*MALLOC, "GLOO_SOCKET_IFNAME", "CXX"}
    return {name: now[name] for name in sorted(now) if name.startswith("ROUNDELAY_") or name in others}


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """How a launcher started this process; None if it was started by hand.

    Raises:
        UsageError: the launcher's variables are incomplete.
    """
    return launchers.launched(os.environ if environment is None else environment)


def is_launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process."""
    return launchers.is_launched(os.environ if environment is None else environment)


def launched_as(environment: Mapping[str, str] | None = None) -> str | None:
    """Which of a launcher's workers this process is, for people; None if it was started by hand."""
    number = launchers.rank_of(os.environ if environment is None else environment)
    return None if number is None else f"worker {number}"


def by_torchrun(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher is torchrun, whose processes are its own children and its to end."""
    return launchers.is_torchrun(os.environ if environment is None else environment)


def leads(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a person looks at this process: it was started by hand, or is the launcher's leader."""
    return launchers.rank_of(os.environ if environment is None else environment) in (None, str(LEADER))


def first_on_host(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process tells what all that a launcher started on this host would tell in the same words."""
    return launchers.local_rank_of(os.environ if environment is None else environment) == "0"
