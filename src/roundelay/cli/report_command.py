"""``roundelay report``: one HTML page on a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from roundelay.cli.screen import show_json, stderr
from roundelay.cli.text_file import write_text
from roundelay.page.run_page import run_page


def report_command(run: Path, output: Path | None, *, opened: bool, as_json: bool) -> None:
    """Write the page.

    Args:
        run: the run's folder.
        output: where to write the page; None: in the folder.
        opened: show it in the web browser.
        as_json: print one JSON object.
    """
    text, path = run_page(run), output or run / "report.html"
    write_text(path, text)
    if as_json:
        show_json({"path": str(path), "bytes": len(text.encode())})
    else:
        stderr.print(f"Wrote {path}.", markup=False)
    if opened:
        webbrowser.open(path.resolve().as_uri())
