"""What a run leaves behind: its folder, its metrics, its trace, its checkpoints.

`run_folder` makes the folder; `metrics` writes one line per update, and `curves` the same for TensorBoard; `trace`
writes who computed what and when, for Perfetto; `checkpoint` writes and reads what a run needs to go on, and `stored`
its files; `files` replaces files and folders without a moment in which neither the old nor the new one can be read;
`digest` tells two results apart.
Nothing here knows how a run is run.
"""
