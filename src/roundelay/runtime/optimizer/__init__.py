"""The person's optimizer and scheduler, taken apart by stages: their state and their steps."""
