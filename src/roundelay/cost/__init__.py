"""What things cost, in seconds and bytes, terms kept apart. Pure Python, no torch."""
