"""Curves are what TensorBoard reads back, count every update once, and leave no thread to be forked beside."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.errors import RunError, UsageError
from roundelay.observe.tensorboard import WRITER, Curves, writer
from tests.observe.event_files import points


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with Curves(tmp_path / "t", writer(), 0) as curves:
        for update in range(20):
            curves.write(update, {"loss": 1 / (update + 1), "busy/worker_0": 0.5})
    found = points(tmp_path / "t")
    assert found == {
        "loss": [(update, pytest.approx(1 / (update + 1))) for update in range(20)],
        "busy/worker_0": [(update, 0.5) for update in range(20)],
    }


def test_nothing_is_made_and_no_thread_begins_before_the_first_value(tmp_path: Path) -> None:
    before = threading.enumerate()
    with Curves(tmp_path / "t", writer(), 0):
        assert threading.enumerate() == before
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("start", [0, 3])
def test_updates_that_are_made_again_replace_the_old_ones(tmp_path: Path, start: int) -> None:
    with Curves(tmp_path / "t", writer(), 0) as curves:
        for update in range(6):
            curves.write(update, {"loss": 1.0})
        curves.restart(start)
        for update in range(start, 8):
            curves.write(update, {"loss": 2.0})
    assert points(tmp_path / "t")["loss"] == [(update, 1.0 if update < start else 2.0) for update in range(8)]


def test_another_process_goes_on_where_the_first_was(tmp_path: Path) -> None:
    for start, stop in ((0, 5), (4, 7)):
        with Curves(tmp_path / "t", writer(), start) as curves:
            for update in range(start, stop):
                curves.write(update, {"loss": float(start)})
    assert points(tmp_path / "t")["loss"] == [(update, 0.0 if update < 4 else 4.0) for update in range(7)]


def test_no_thread_is_left_when_workers_are_forked_anew(tmp_path: Path) -> None:
    before = threading.enumerate()
    curves = Curves(tmp_path / "t", writer(), 0)
    curves.write(0, {"loss": 1.0})
    assert threading.enumerate() != before
    curves.restart(0)
    assert threading.enumerate() == before
    curves.close()


def test_what_was_written_is_on_the_disk_after_a_close_and_a_second_one_does_nothing(tmp_path: Path) -> None:
    curves = Curves(tmp_path / "t", writer(), 0)
    curves.write(0, {"loss": 1.0})
    curves.close()
    assert points(tmp_path / "t") == {"loss": [(0, 1.0)]}
    curves.close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("in the way")
    with pytest.raises(RunError, match=f"writing {tmp_path / 't'}"), Curves(tmp_path / "t", writer(), 0) as curves:
        curves.write(0, {"loss": 1.0})


def full(*args: Any, **options: Any) -> SimpleNamespace:
    """A writer on a full disk."""

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    return SimpleNamespace(add_scalar=lambda *args: None, close=fail)


def test_a_full_disk_is_told_at_the_end_unless_something_else_has_ended_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No space left on device"), Curves(tmp_path, full, 0) as curves:
        curves.write(0, {"loss": 1.0})
    curves = Curves(tmp_path, full, 0)
    curves.write(0, {"loss": 1.0})
    with pytest.raises(KeyboardInterrupt), curves:
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [ImportError("no such package"), TypeError("Descriptors cannot be created")])
def test_a_package_that_is_missing_or_broken_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.delitem(sys.modules, WRITER, raising=False)
    monkeypatch.setattr("roundelay.optional_packages.importlib.import_module", fail)
    with pytest.raises(UsageError, match="pip install tensorboard") as caught:
        writer()
    assert str(error) in caught.value.got
