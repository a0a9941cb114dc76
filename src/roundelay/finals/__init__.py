"""Finals: the best plans of a search are run for some seconds each, and the fastest is taken."""
