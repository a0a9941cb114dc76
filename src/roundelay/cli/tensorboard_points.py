"""``train --tensorboard``: events of a run as points of curves."""

from __future__ import annotations

from roundelay.api.state_gather import Evaluated, Event, Restarted, Updated
from roundelay.observe.tensorboard import Curves


def draw(event: Event, curves: Curves) -> None:
    """Add an event to the curves.

    Raises:
        RunError: they cannot be written.
    """
    if isinstance(event, Updated):
        rates = {f"learning_rate/group_{i}": rate for i, rate in enumerate(event.learning_rates)}
        busy = {f"busy/worker_{k}": share for k, share in enumerate(event.busy)}
        metrics = {f"training/{name}": value for name, value in event.metrics.items()}
        scale = {} if event.loss_scale is None else {"loss_scale": event.loss_scale}
        values = {
            "loss": event.loss,
            **metrics,
            **scale,
            "samples_per_second": event.samples_per_second,
            **rates,
            **busy,
        }
        curves.write(event.update, values)
    elif isinstance(event, Evaluated):  # at the same step as the loss of the last update
        curves.write(event.updates - 1, {f"evaluation/{name}": value for name, value in event.metrics.items()})
    elif isinstance(event, Restarted):
        curves.restart(event.updates)
