"""One run, or a comparison of runs, as one HTML page: figures drawn as SVG by our own functions, nothing fetched.

Nothing needs JavaScript. `read` takes what a run folder holds, `steady` a window of its trace; `scale`, `curves`,
`bars` and `timeline` draw; `sections` says what a figure means; `look` holds style and the few lines of script;
`build` puts the page together. `comparison` is the page of a comparison; `picture` draws the same curves as PNG.
Whatever comes from outside is escaped where it is put into text.
"""
