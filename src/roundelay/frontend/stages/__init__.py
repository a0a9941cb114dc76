"""Functions of stages: forward and backward of a graph's segments, with keyed random numbers."""
