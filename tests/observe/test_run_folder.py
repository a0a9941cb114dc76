"""A run's folder is its own, can be written, and `latest` finds it."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from roundelay.errors import RunError, UsageError
from roundelay.observe.metrics_file import read_metrics
from roundelay.observe.process_memory import resident_bytes
from roundelay.observe.run_folder import RunFolder


def full(*args: Any, **kwargs: Any) -> None:
    """A disk without room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_each_run_has_a_folder_of_its_own_and_latest_names_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    made = [RunFolder.create(root).path for _ in range(3)] + [RunFolder.create(root, "mine").path]
    assert len(set(made)) == 4
    assert all(path.parent == root and list(path.iterdir()) == [] for path in made)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", made[0].name)
    assert (root / "latest").readlink() == Path("mine")
    assert {path.name for path in root.iterdir()} == {path.name for path in made} | {"latest"}


def test_latest_moves_with_its_folder(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "runs", "mine").write_plan("x")
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "plan.toml").read_text() == "x"


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "first").write_plan("precious")
    RunFolder.create(tmp_path, "second")
    with pytest.raises(UsageError, match="not empty"):
        RunFolder.create(tmp_path, "first")
    assert (tmp_path / "first" / "plan.toml").read_text() == "precious"
    assert (tmp_path / "latest").readlink() == Path("second")
    assert RunFolder.create(tmp_path, "second").path == tmp_path / "second"  # still empty


def test_what_a_host_that_nobody_joined_has_refused_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "refused.jsonl").write_text("{}\n")
    folder = RunFolder.create(tmp_path, "first")
    folder.discard()
    assert (tmp_path / "first" / "refused.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/a", "latest", ".hidden", "a\0b", "-x", "a\n"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="run name"):
        RunFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UsageError, match="Not a directory"):
            RunFolder.create(root)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"No space left.*free some space"):
        RunFolder.create(tmp_path / "runs")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_real_folder_called_latest_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(UsageError, match="is not a link"):
        RunFolder.create(tmp_path, "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_file_system_without_links_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "symlink_to", full)
    assert RunFolder.create(tmp_path, "mine").path.is_dir()


def test_latest_is_never_absent_while_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.create(tmp_path, "first")
    real, seen = Path.replace, []

    def look(path: Path, target: Path) -> Path:
        seen.append((tmp_path / "latest").readlink().name)
        made = real(path, target)
        seen.append((tmp_path / "latest").readlink().name)
        return made

    monkeypatch.setattr(Path, "replace", look)
    RunFolder.create(tmp_path, "second")
    assert seen == ["first", "second"]


def test_what_is_written_lies_where_it_says(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_plan("a = 1\n")
    run.write_summary({"loss": math.nan, "updates": 3, "busy": [math.inf, 0.5]})
    with run.open_metrics() as metrics:
        metrics.write(update=1, epoch=0, loss=1.0, samples_per_second=1.0, busy=[])
    assert run.plan.read_text() == "a = 1\n"
    assert json.loads(run.summary.read_text()) == {"loss": None, "updates": 3, "busy": [None, 0.5]}
    assert len(read_metrics(run.metrics)) == 1
    assert {path.parent for path in (run.plan, run.metrics, run.summary, run.trace, run.checkpoint)} == {run.path}
    assert {path.name for path in run.path.iterdir()} == {"plan.toml", "summary.json", "metrics.jsonl"}


def test_a_summary_is_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_summary({"updates": 1})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        run.write_summary({"updates": 2})
    assert json.loads(run.summary.read_text()) == {"updates": 1}
    assert [path.name for path in run.path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("before", [False, True])
def test_a_discarded_run_leaves_no_mark(tmp_path: Path, before: bool) -> None:
    if before:
        RunFolder.create(tmp_path / "runs", "before")
    run = RunFolder.create(tmp_path / "runs")
    run.open_metrics().close()
    run.discard()
    assert not run.path.exists()
    assert (tmp_path / "runs").exists() == before
    if before:
        assert (tmp_path / "runs" / "latest").readlink() == Path("before")
    run.discard()


def test_a_run_that_wrote_something_is_not_discarded(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "mine")
    run.write_plan("x")
    run.discard()
    assert run.plan.read_text() == "x"
    assert (tmp_path / "latest").readlink() == Path("mine")


def test_a_folder_that_was_there_before_stays_when_discarded(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    RunFolder.create(tmp_path, "mine").discard()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_discarding_leaves_a_newer_runs_link_alone(tmp_path: Path) -> None:
    old = RunFolder.create(tmp_path, "old")
    RunFolder.create(tmp_path, "new")
    old.discard()
    assert (tmp_path / "latest").readlink() == Path("new")


def test_evaluations_are_added_and_those_that_will_be_made_again_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    folder.cut_evaluations(0)
    assert not folder.evaluations.exists()
    for update in (5, 11, 17):
        folder.add_evaluation(update, update // 6, {"accuracy": update / 20, "odd": float("nan")})
    folder.cut_evaluations(12)
    found = [(line["update"], line["epoch"], line["metrics"]) for line in read_metrics(folder.evaluations)]
    assert found == [(5, 0, {"accuracy": 0.25, "odd": None}), (11, 1, {"accuracy": 0.55, "odd": None})]


def test_resident_bytes_grow_with_what_is_touched_and_the_peak_stays() -> None:
    before = resident_bytes()
    if before is None:
        pytest.skip("no /proc/self/status here")
    held = bytearray(b"x") * 64_000_000
    during = resident_bytes()
    assert during is not None
    assert during[0] > before[0] + 40_000_000
    assert len(held) == 64_000_000
    del held
    after = resident_bytes()
    assert after is not None
    assert after[1] > before[0] + 40_000_000  # the kernel counts both a little apart
    assert after[0] < after[1] - 20_000_000
