"""The actor machine: decides from events what a worker runs next. It performs no I/O and imports no torch."""
