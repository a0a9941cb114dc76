"""The actor machine: told what happens, it says what to run; no input or output of its own, no torch."""
