"""The actor machine: told what happens, it says what to run, without input or output of its own. Pure Python, no torch."""
