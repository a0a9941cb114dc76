"""What is reachable from Python objects: their state, and the bytecode and the source lines of their functions."""
