"""The model zoo: small models, with data and loss, on which the tests run "for every model"."""

from __future__ import annotations

from . import awkward, dense, language, sequence, vision
from .entry import Arguments, Batch, Entry, arguments, rows, scalar

ZOO: dict[str, Entry] = {
    entry.name: entry for module in (language, dense, vision, sequence, awkward) for entry in module.ENTRIES
}

__all__ = ["ZOO", "Arguments", "Batch", "Entry", "arguments", "rows", "scalar"]
