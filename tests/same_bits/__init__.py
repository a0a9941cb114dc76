"""A refactoring changes not one bit: the same small jobs, run by two versions of the source and compared."""
