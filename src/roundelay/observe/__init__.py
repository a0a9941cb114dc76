"""What a run reports: its folder, its metrics, its trace.

`run_folder` makes the folder; `metrics_file` writes one line per update, and `tensorboard` the same for TensorBoard;
`trace` writes who computed what and when, for Perfetto; `digest` tells results apart, `state_digest` whole states.
Nothing here knows how a run is executed.
"""
