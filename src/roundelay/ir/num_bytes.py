"""Numbers of bytes as people write them: ``512 MiB``, ``1.5 GiB``."""

from __future__ import annotations

import re
from decimal import Decimal

from roundelay.errors import PlanError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TEXT = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})?", re.IGNORECASE)


def bytes_text(num_bytes: float) -> str:
    """A number of bytes as text, such as ``1.5 MiB``."""
    for unit in _UNITS[:3]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def parse_bytes(text: str | int, subject: str) -> int:
    """The number of bytes that a text such as ``8GiB`` means.

    Args:
        text: a number, with or without a unit, a power of 1024.
        subject: what is parsed, for the error.

    Raises:
        PlanError: it means none.
    """
    match = _TEXT.fullmatch(str(text).strip())
    if match is None:
        raise PlanError(
            subject, got=repr(text), expected="a number and one of " + ", ".join(_UNITS), remedy="Give 8GiB, say."
        )
    number, unit = match.groups()
    exponent = [one.lower() for one in _UNITS].index((unit or "B").lower())
    return int(Decimal(number) * 1024**exponent)
