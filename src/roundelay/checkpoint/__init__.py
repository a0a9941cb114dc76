"""Training state on disk: checkpoints from which a run is resumed or a model is loaded.

`checkpoint` writes and reads a checkpoint; `in_flight` holds the micro-batches that were in flight when it was made;
`stored_files` writes and verifies its files; `atomic_files` replaces files and folders atomically.
"""
