"""The model zoo: models with data and loss.

On the small ones of `ZOO` the tests run that say "for every model". `NETWORKS` are whole networks, each
verified by a few tests of its own, and with any rule by ``python -m tests.equivalence.table --models NAME``.
"""

from __future__ import annotations

from . import awkward, dense, language, networks, sequence, vision
from .entry import Arguments, Batch, Entry, arguments, rows, scalar

ZOO: dict[str, Entry] = {
    entry.name: entry for module in (language, dense, vision, sequence, awkward) for entry in module.ENTRIES
}
NETWORKS: dict[str, Entry] = {entry.name: entry for entry in networks.ENTRIES}
MODELS: dict[str, Entry] = ZOO | NETWORKS

__all__ = ["MODELS", "NETWORKS", "ZOO", "Arguments", "Batch", "Entry", "arguments", "rows", "scalar"]
