"""Comparisons: of update rules, seed by seed, and of the forms of cyclic data parallelism, as the paper's tables."""
