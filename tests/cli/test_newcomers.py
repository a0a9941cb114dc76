"""Four jobs of a newcomer, as they are typed: into a log file, and in a notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cli.harness import JOBS, ROOT, environment

NEWCOMERS = JOBS / "newcomers"
UPDATES = {"cnn": 32, "language_model": 30, "vae": 32, "groups": 16}


@pytest.mark.parametrize("name", UPDATES)
def test_a_log_file_tells_what_a_person_wants_to_know(name: str, tmp_path: Path) -> None:
    length = [] if name == "language_model" else ["--epochs", "2"]
    with (tmp_path / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "roundelay", "train", str(NEWCOMERS / f"{name}.py"), *length]
        code = subprocess.run(command, env=environment(), stdout=log, stderr=log, timeout=180, cwd=tmp_path).returncode
    text = (tmp_path / "log.txt").read_text()
    assert code == 0, text
    assert "Traceback" not in text
    assert not re.search(r"^[WE]\d{4} ", text, re.MULTILINE), "torch's own log"
    lines = text.splitlines()
    ends = next(i for i, line in enumerate(lines) if re.match(r"loss \d\.\d{4} -> \d\.\d{4}", line))
    assert f"in {UPDATES[name]} updates" in lines[ends]
    assert ("accuracy " in lines[ends]) == (name == "cnn")
    assert (lines[ends + 1] == "evaluation: accuracy " + lines[ends + 1][-6:]) == (name == "groups")
    assert any(re.match(r"[\d.]+ samples/s, 1f1b on ", line) for line in lines[ends:])
    assert len(lines) - ends <= 5
    folder = Path(re.search(r"Run folder: (\S+)", text)[1])  # type: ignore[index]
    made = {path.name for path in (tmp_path / folder).iterdir()}
    assert made >= {"plan.toml", "metrics.jsonl", "summary.json", "trace.json", "checkpoint"}
    if name == "language_model":  # three seconds, so that a line is due
        assert re.search(r"^update \d+/30  loss \d\.\d{4}  \d+ samples/s  \d s left$", text, re.MULTILINE), text
    command = [sys.executable, "-m", "roundelay", "report", str(folder)]
    subprocess.run(command, env=environment(), check=True, timeout=120, cwd=tmp_path, capture_output=True)
    page = (tmp_path / folder / "report.html").read_text()
    assert "<svg" in page


CELLS = """
import sys
sys.path[:0] = [{source!r}, {jobs!r}]
import roundelay
---
import {name}
result = roundelay.train({name}.job, workers=2, epochs={epochs}, out="run-{name}")
print(result)
---
page = result.report()
print(page.stat().st_size > 10_000, len(result.updates))
"""


def test_a_notebook_trains_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[str] = []
    for name in UPDATES:
        epochs = 1 if name == "language_model" else 2
        text = CELLS.format(source=str(ROOT / "src"), jobs=str(NEWCOMERS), name=name, epochs=epochs)
        sources += text.split("---\n")[0 if not sources else 1 :]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])  # type: ignore[no-untyped-call]
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
    client = NotebookClient(book, timeout=180, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    told = ["".join(out.get("text", "") for out in cell.get("outputs", [])) for cell in book.cells]
    for name, count in UPDATES.items():
        at = next(i for i, source in enumerate(sources) if f"import {name}" in source)
        assert f"updates={count}" in told[at]
        assert f"Run folder: run-{name}" in told[at]
        assert f"True {count}" in told[at + 1]
    at = next(i for i, source in enumerate(sources) if "import language_model" in source)
    assert re.search(r"update \d+/\d+  loss|update \d+  loss", told[at]), told[at]
