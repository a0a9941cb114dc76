"""The actor machine: events in, commands out, no input or output of its own. Pure Python, no torch."""
