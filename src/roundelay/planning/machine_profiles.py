"""Machine profiles in files: read ones, and those that are kept for later plans."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from roundelay.checkpoint.atomic_files import replacing_file
from roundelay.env import cache_folder, malloc_settings
from roundelay.errors import PlanError, RunError
from roundelay.observe.profile_cache import machine, place
from roundelay.planner.machine_profile import MachineProfile, bad_profile


def machine_here() -> dict[str, Any]:
    """What a profile of this machine says of it: ``processor``, ``cores`` and ``torch``."""
    return {**machine(), "torch": str(torch.__version__)}


def read_profile(path: Path) -> MachineProfile:
    """Read a profile of this machine.

    Raises:
        PlanError: it cannot be read, is no profile, or is of another machine.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad_profile(f" {path}", str(error), "one that `roundelay calibrate` has written") from error
    profile = MachineProfile.parse(text)
    profile.check_machine(machine_here())
    return profile


def found_profile(transport: str, workers: int, threads: int, hosts: int = 1) -> MachineProfile | None:
    """The profile that :func:`keep_profile` has kept for such workers on this machine; None if none is valid."""
    with suppress(PlanError):
        path = _place(transport, workers, threads, hosts)
        return None if path is None else read_profile(path)
    return None


def keep_profile(profile: MachineProfile) -> Path | None:
    """Keep a profile for :func:`found_profile`; returns where, or None if it cannot be kept."""
    path = _place(profile.transport, profile.workers, profile.threads, profile.hosts)
    with suppress(OSError, RunError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(path) as file:
                file.write(profile.text())
            return path
    return None


def _place(transport: str, workers: int, threads: int, hosts: int) -> Path | None:
    folder, workers_here = cache_folder(), [transport, workers, threads, hosts]
    key = {**machine_here(), "workers": workers_here, "malloc": malloc_settings()}
    return None if folder is None else place(folder, key).with_suffix(".toml")
