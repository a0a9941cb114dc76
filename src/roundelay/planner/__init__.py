"""Choosing: where to cut, how many slots, and why. Pure Python, no torch."""
