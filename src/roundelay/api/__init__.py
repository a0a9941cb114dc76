"""The library's face: what the commands call, and what a notebook can call.

Each function takes a :class:`~roundelay.job.Job`. Only :func:`train` changes the job's model: it leaves the trained
weights in it.
"""

from roundelay.api.comparison import compare
from roundelay.api.events import Updated
from roundelay.api.planning import capture, default_workers, plan
from roundelay.api.simulating import simulate
from roundelay.api.training import train
from roundelay.api.verifying import verify
from roundelay.api.weights_file import empty_weights, load

__all__ = [
    "Updated",
    "capture",
    "compare",
    "default_workers",
    "empty_weights",
    "load",
    "plan",
    "simulate",
    "train",
    "verify",
]
