"""Training state on disk: checkpoints from which a run is resumed or a model is loaded.

`checkpoint` completes and reads a checkpoint; `stored_files` writes and verifies its files; `held_state` is what one
holder has, `shards` which part of a parameter that is; `in_flight_state` holds the micro-batches that were in flight;
`atomic_files` replaces single files atomically.
"""
