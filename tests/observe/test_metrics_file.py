"""Metrics lines are there at once, valid for every parser, and outlive a kill."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import RunError, UsageError
from roundelay.observe.metrics_file import MetricsWriter, read_metrics, read_records
from tests.observe.harness import forked, status


def write(writer: MetricsWriter, update: int, **more: Any) -> None:
    """One line."""
    writer.write(update=update, epoch=0, loss=0.5, samples_per_second=10.0, busy=[0.5, 1.0], **more)


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        write(writer, 1, lag=3)
        line = {"update": 1, "epoch": 0, "loss": 0.5, "samples_per_second": 10.0, "busy": [0.5, 1.0], "lag": 3}
        assert read_metrics(tmp_path / "m") == [line]


def strict(text: str) -> Any:
    """As the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@given(loss=st.floats(), busy=st.lists(st.floats()), more=st.dictionaries(st.text(min_size=1), st.floats() | st.text()))
def test_every_line_is_strict_json(tmp_path_factory: pytest.TempPathFactory, loss: float, busy: Any, more: Any) -> None:
    path = tmp_path_factory.mktemp("m") / "m"
    with MetricsWriter(path) as writer:
        writer.write(update=1, epoch=0, loss=loss, samples_per_second=1.0, busy=busy, deep={"er": [more]})
    (line,) = path.read_text(encoding="utf-8").splitlines()
    found = strict(line)
    assert found["loss"] == (loss if math.isfinite(loss) else None)
    assert found["busy"] == [share if math.isfinite(share) else None for share in busy]
    assert found["deep"]["er"][0].keys() == more.keys()


def test_a_torn_last_line_is_not_there_yet(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        write(writer, 1)
        write(writer, 2)
    whole = (tmp_path / "m").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "m").write_bytes(whole[:length])
        assert len(read_metrics(tmp_path / "m")) == whole[:length].count(b"\n")


def test_a_run_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m") as writer:
        write(writer, 1)
        write(writer, 2)
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-5])
    with MetricsWriter(tmp_path / "m") as writer:
        write(writer, 2)
        write(writer, 3)
    assert [line["update"] for line in read_metrics(tmp_path / "m")] == [1, 2, 3]


@pytest.mark.parametrize("text", ["{]\n", "3\n", '{"update": 1}\n\n{"update": 2}\n', "\xff\n"])
def test_a_whole_line_that_is_no_object_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "m").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match="in line"):
        read_metrics(tmp_path / "m")


class Scored(msgspec.Struct):
    """A line with a score, and more."""

    update: int
    score: float = 1.0
    metrics: dict[str, float] = {}


def test_lines_are_read_as_records_and_null_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"update": 3, "score": null, "metrics": {"a": null, "b": 2}, "other": []}\n')
    (found,) = read_records(tmp_path / "m", Scored)
    assert (found.update, found.score, found.metrics["b"]) == (3, 1.0, 2.0)
    assert math.isnan(found.metrics["a"])


@pytest.mark.parametrize(
    ("text", "field"),
    [('{"score": 1.0}', "`update`"), ('{"update": 1, "score": "high"}', "score"), ('{"update": true}', "update")],
)
def test_a_field_that_cannot_be_read_is_named(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "m").write_text('{"update": 0}\n' + text + "\n")
    with pytest.raises(UsageError, match=f"in line 2: .*{field}"):
        read_records(tmp_path / "m", Scored)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_metrics(tmp_path / "m")
    with pytest.raises(RunError, match="directory"):
        MetricsWriter(tmp_path)


def test_a_full_disk_is_told_and_the_lines_before_stay(tmp_path: Path) -> None:
    """A limit on the file's size takes the place of a full disk: the last line fits in part."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, 250))
        with MetricsWriter(tmp_path / "m") as writer:
            write(writer, 0)
            write(writer, 1)
            with pytest.raises(RunError, match="too large"):
                write(writer, 2)

    assert status(forked(child)) == 0
    assert (tmp_path / "m").stat().st_size == 250
    assert [line["update"] for line in read_metrics(tmp_path / "m")] == [0, 1]
