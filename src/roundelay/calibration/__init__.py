"""Calibration: measures a machine's profile with the runtime's own workers; the one place that measures links."""

SECONDS = 20.0
"""Seconds after which no further sweep over all measurements begins, if nothing else is said."""
