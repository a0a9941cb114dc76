"""Training state on disk: what a run needs to go on from a checkpoint, or a model to be loaded from one.

`checkpoint` writes and reads a checkpoint; `in_flight` holds the micro-batches that were in flight when it was made;
`stored_files` are its files with their digests; `atomic_files` replaces files and folders without a moment in which
neither the old nor the new one can be read.
"""
