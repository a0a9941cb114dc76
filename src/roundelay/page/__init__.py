"""HTML reports of a run or a comparison: self-contained pages with figures drawn as inline SVG.

No page needs JavaScript. `read_run` reads a run folder and `trace_window` part of its trace; `line_chart`, `bars` and
`timeline` draw on the axes of `scale`; `sections` has the page's sections; `style` has the CSS and a short script;
`run_page` assembles the page. `comparison_page` is the page of a comparison; `png` draws its curves as PNG.
`explain_page` is the page of a plan.
Text that comes from outside is escaped where it is inserted.
"""
