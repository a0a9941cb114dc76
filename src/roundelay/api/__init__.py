"""The library's public API, which the commands use too.

Each function takes a :class:`~roundelay.job.Job`. Only :func:`train` changes the job's model, to which it writes the
trained weights.
"""

from roundelay.api.comparison import compare
from roundelay.api.cuts import default_workers
from roundelay.api.events import Updated
from roundelay.api.planning import capture, plan, simulate
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
