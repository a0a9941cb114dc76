"""What one check says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from roundelay.doctor.machine import Machine

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Args:
        name: what was looked at.
        found: what was found, in words.
        state: ``problem``: something that Roundelay offers everywhere does not work; ``warning``: a part would not
            work or would be slow; ``ok``: neither.
        remedy: what to do about it; may be empty where all is well.
    """

    name: str
    found: str
    state: State = "ok"
    remedy: str = ""


Check = Callable[[Machine], Finding]


def size(num_bytes: float) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
