"""Holds the person's program to plain PyTorch: what would silently train otherwise is refused by name."""
