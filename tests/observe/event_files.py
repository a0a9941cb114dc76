"""Reads back what was written for TensorBoard, by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Curve to its points (update, value), as TensorBoard shows them."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
