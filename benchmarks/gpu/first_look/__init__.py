"""A first look on a machine with a GPU: one command that prints, in minutes, what holds there; see ../README.md."""
