"""The network named in FIRST_LOOK_NETWORK, as a job for the command line."""

from __future__ import annotations

import os

from benchmarks.gpu.first_look.networks import endless, made
from roundelay import Job


def job(seed: int) -> Job:
    return endless(made(os.environ["FIRST_LOOK_NETWORK"], os.environ.get("FIRST_LOOK_TINY") == "1"))
