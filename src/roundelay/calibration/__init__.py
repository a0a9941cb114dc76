"""Calibration: measures a machine's profile with the runtime's own workers; the one place that measures links."""
