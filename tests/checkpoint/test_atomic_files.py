"""A file is the old or the new one at every instant."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from roundelay.checkpoint.atomic_files import replacing_file
from tests.observe.harness import dying, forked, status


def write(path: Path, text: str) -> None:
    """Replace a file's text, in two pieces."""
    with replacing_file(path) as file:
        file.write(text[:5])
        file.flush()
        file.write(text[5:])


def test_a_kill_at_any_step_leaves_the_old_or_the_new_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, "old text")
    for step in range(1, 20):
        code = status(forked(dying(lambda: write(path, "new text"), step)))
        assert path.read_text() in (("old text", "new text") if code else ("new text",))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        write(path, "old text")
    assert step > 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_error_while_writing_leaves_the_old_text_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "file", "old text")
    with pytest.raises(UnicodeEncodeError):
        write(tmp_path / "file", "new, \udc80 which is no text")
    assert (tmp_path / "file").read_text() == "old text"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_who_opened_the_old_text_reads_it_to_its_end(tmp_path: Path) -> None:
    """The new text takes the old one's name, not its place."""
    write(tmp_path / "file", "old text")
    with (tmp_path / "file").open() as reader:
        write(tmp_path / "file", "new")
        assert reader.read() == "old text"
