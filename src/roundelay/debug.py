"""Every environment variable that Roundelay reads, parsed once.

``ROUNDELAY_DEBUG``: 0 (default) nothing; 1 the plan and tracebacks; 2 also timings; 3 also programs; 4 also events.
"""

from __future__ import annotations

import os

from roundelay.errors import UsageError

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
        raise UsageError(
            "environment variable ROUNDELAY_DEBUG",
            got=repr(text),
            expected=f"one of {good}",
            remedy="Set it to one of these, or unset it.",
        )
    return int(text)
