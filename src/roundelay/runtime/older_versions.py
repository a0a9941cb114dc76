"""Older versions of a stage's weights: those that a later forward reads, and those that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from roundelay.checkpoint.in_flight_state import Weights


@final
class OlderVersions:
    """The versions of a stage's weights before the newest, as far as they are still needed.

    Args:
        kept: by version, those that a resumed run begins with; changed.
        saves_before: whether a checkpoint has the version before its own, since what follows reads that.
    """

    def __init__(self, kept: dict[int, Weights], *, saves_before: bool) -> None:
        self.kept = kept
        self._saves_before = saves_before
        self._oldest: int | None = None  # that a later forward reads
        self._before: Weights = {}  # the weights before an update that a checkpoint follows

    def hold_from(self, oldest: int | None) -> None:
        """Hold versions from the oldest that a later forward reads, if any, and drop those before it."""
        self._oldest = oldest
        if self.kept:
            for version in [v for v in self.kept if oldest is None or v < oldest]:
                del self.kept[version]

    def release(self, version: int) -> None:
        """Drop versions before this one: what reads them, anywhere, is done."""
        self.hold_from(None if self._oldest is None else version)

    def keep(self, version: int, weights: Mapping[str, torch.Tensor], *, saved: bool) -> None:
        """Keep weights that an update will replace, if they are needed.

        Args:
            version: theirs.
            weights: by name; not modified afterwards while :meth:`addresses` has theirs.
            saved: whether a checkpoint follows the update.
        """
        needed = self._oldest is not None and self._oldest <= version
        if needed:
            self.kept[version] = {n: weight.detach() for n, weight in weights.items()}
        self._before = {n: w.detach() for n, w in weights.items()} if saved and self._saves_before else {}

    def addresses(self) -> set[int]:
        """The addresses of weights that are kept."""
        return {weight.data_ptr() for weights in (*self.kept.values(), self._before) for weight in weights.values()}

    def checkpointed(self, updates: int, *, copied: bool) -> tuple[Mapping[int, Weights], int | None]:
        """What a checkpoint after so many updates has of them, and the oldest version in it.

        Args:
            updates: made by the stage.
            copied: whether the memory of the weights is about to be freed.
        """
        if not self._saves_before:
            return self.kept, self._oldest
        if copied:
            self._before = {name: weight.clone() for name, weight in self._before.items()}
        return {updates - 1: self._before}, updates - 1
