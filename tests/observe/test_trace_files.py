"""Letters and digests in a run's folder: appended, begun anew by a restart, and read back only if of one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roundelay.errors import RunError, UsageError
from roundelay.observe.action_trace import TraceHead
from roundelay.session.events import Restarted, Traced
from roundelay.session.trace_files import TraceFiles, folder_of, folder_with, read_traces

HEAD = TraceHead(stage=0, stages=2, plan="0" * 16, model="m", seed=3, arithmetic="f" * 16, first=(0, 0))
DIGEST = "a" * 16


def heads(**changes: object) -> list[TraceHead]:
    """Of both stages."""
    return [replace(HEAD, stage=stage, **changes) for stage in (0, 1)]


def write(files: TraceFiles, head: TraceHead, *parts: tuple[str, dict[int, str]]) -> None:
    """Report parts; the last ends the run."""
    for number, (letters, digests) in enumerate(parts, 1):
        files(Traced(head, letters, digests, number == len(parts)))


def test_parts_are_appended_and_read_back(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path)
    for head in heads():
        write(files, head, ("FF", {}), ("BF", {3: DIGEST}), ("B", {5: DIGEST}))
    for stage, trace in enumerate(read_traces(folder_of(tmp_path, 0), 2)):
        assert (trace.head.stage, trace.letters, trace.ended) == (stage, "FFBFB", True)
        assert trace.digests == {3: DIGEST, 5: DIGEST}


def test_a_restarted_run_begins_its_traces_anew(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path)
    files(Traced(HEAD, "FFB", {3: DIGEST}, ended=False))
    files(Restarted(1, 0, "why"))
    for head in heads():
        write(files, head, ("FB", {2: DIGEST}))
    assert [trace.letters for trace in read_traces(folder_of(tmp_path, 0), 2)] == ["FB", "FB"]


def test_what_follows_on_a_checkpoint_has_a_folder_of_its_own(tmp_path: Path) -> None:
    files = TraceFiles(tmp_path)
    for first, letters in [((0, 0), "FFBB"), ((6, 3), "FB")]:
        for head in heads(first=first):
            write(files, head, (letters, {len(letters): DIGEST}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace-from-3"]
    assert [trace.letters for trace in read_traces(folder_of(tmp_path, 3), 2)] == ["FB", "FB"]
    assert [trace.letters for trace in read_traces(folder_of(tmp_path, 0), 2)] == ["FFBB", "FFBB"]


@pytest.mark.parametrize(
    "change",
    [{"plan": "1" * 16}, {"model": "n"}, {"seed": 4}, {"arithmetic": "e" * 16}, {"first": (1, 0)}, {"stages": 3}],
)
def test_traces_of_two_runs_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    files = TraceFiles(tmp_path)
    write(files, HEAD, ("FB", {}))
    write(files, replace(HEAD, stage=1, **change), ("FB", {}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"stage-1\.txt"):
        read_traces(folder_of(tmp_path, 0), 2)


def test_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    write(TraceFiles(tmp_path), HEAD, ("FB", {}))
    with pytest.raises(UsageError, match=r"stage-0\.txt"):
        read_traces(folder_of(tmp_path, 0), 1)


def test_a_trace_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    with pytest.raises(RunError, match=r"trace .*stage-0\.txt"):
        write(TraceFiles(tmp_path), HEAD, ("FB", {}))


def test_a_run_that_has_continued_another_asks_for_where_it_began(tmp_path: Path) -> None:
    (tmp_path / "trace-from-10").mkdir()
    with pytest.raises(UsageError, match=r"trace-from-10.*Add --from CHECKPOINT"):
        folder_with(tmp_path, None)
    assert folder_with(tmp_path / "elsewhere", None) == tmp_path / "elsewhere" / "trace"
