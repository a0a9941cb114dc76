"""The page in a browser, where there is one: it renders, says nothing on its console, and may load nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from roundelay.cli.explained import explained
from roundelay.page.explain_page import explain_page
from roundelay.page.run_page import run_page
from roundelay.search.account import account
from tests.page.runs import finished, planned

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--dump-dom",
)
POINT = """<script>
const plot = [...document.querySelectorAll('svg.plot')].find(svg => svg.getBoundingClientRect().width > 0);
const box = plot.getBoundingClientRect();
const at = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
plot.dispatchEvent(new PointerEvent('pointermove', at));
</script></body>"""


def rendered(folder: Path, text: str, width: int = 1400) -> tuple[str, list[str]]:
    """The page's document after its script has run, and what the browser's console said."""
    (folder / "page.html").write_text(text)
    command = [str(BROWSER), *FLAGS, f"--window-size={width},3000", f"--user-data-dir={folder / 'profile'}"]
    process = subprocess.Popen(
        [*command, (folder / "page.html").as_uri()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, err[-2000:]
    return out, [line for line in err.splitlines() if "CONSOLE" in line]


def test_a_page_renders_and_its_console_stays_silent(tmp_path: Path) -> None:
    text = run_page(finished(tmp_path).path)
    dom, console = rendered(tmp_path, text)
    assert console == []
    assert dom.count("<svg") == text.count("<svg") > 20
    said = ("Metrics", "Where the time went", "As it ran, in the middle of the run", "private", "finished")
    for words in (*said, ">reader</text>"):
        assert words in dom


def test_values_are_shown_below_the_cursor(tmp_path: Path) -> None:
    text = run_page(finished(tmp_path).path)
    dom, console = rendered(tmp_path, text.replace("</body>", POINT))
    assert len(console) == 0
    (cursor,) = re.findall(r'<g class="cursor".*?</g>', dom)
    assert re.findall(r"<text[^>]*>([^<]*)</text>", cursor)[0].startswith("update ")
    assert "smoothed" in cursor


def test_the_browser_refuses_whatever_the_page_would_load(tmp_path: Path) -> None:
    """Guards the guard: a picture that is smuggled in is not fetched, and the console says so."""
    text = run_page(finished(tmp_path).path)
    _, console = rendered(tmp_path, text.replace("<footer>", '<img src="http://127.0.0.1:9/x.png"><footer>'))
    assert any("Content Security Policy" in line for line in console)


SCROLLS = """<script>
document.body.dataset.scrolls = String(document.documentElement.scrollWidth > document.documentElement.clientWidth);
</script></body>"""


@pytest.mark.parametrize("width", [1280, 800])
def test_the_page_of_a_plan_renders_and_does_not_scroll_sideways(tmp_path: Path, width: int) -> None:
    plan = planned(workers=8)
    own = account(plan)
    text = explain_page("a.toml", explained(plan, own), plan, own.simulation, own.path)
    dom, console = rendered(tmp_path, text.replace("</body>", SCROLLS), width)
    assert console == []
    assert 'data-scrolls="false"' in dom
