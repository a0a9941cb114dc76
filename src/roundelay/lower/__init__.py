"""From a plan to one program per worker: partition, emit, check. Pure Python, no torch."""
