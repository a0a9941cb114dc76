"""GPT-2 of 12 layers, on 4 rows of 512 tokens."""

from __future__ import annotations

from benchmarks.before_first_update.jobs.gpt2 import made
from roundelay import Job


def job(seed: int) -> Job:
    """12 layers."""
    return made(12, 8, 512)
