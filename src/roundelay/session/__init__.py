"""One training from start to end: checkpoints, where it goes on, restarts, records and events."""
