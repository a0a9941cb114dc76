"""Numbers of things and lists of names, in words for people."""

from __future__ import annotations

from collections.abc import Sequence

_FEW = 4


def counted(number: int, word: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """The names if they are few, else the first of them, and how many there are."""
    shown = ", ".join(names[:_FEW])
    return shown if len(names) <= _FEW else f"{shown}, ... ({len(names)} in all)"
