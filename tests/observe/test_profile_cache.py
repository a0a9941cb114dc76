"""Kept profiles: what was kept is found, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.ir.graph import Profile
from roundelay.observe.profile_cache import keep, kept, machine, place

KEY: dict[str, Any] = {"model": "a graph", "tensors": {"input.0": ["torch.float32", 8, 6]}, "threads": 1, **machine()}
PROFILE = Profile((1e-6, 2.5e-3, 0.1), (0.0, 5e-3, 0.2), (1e-5, 0.0, 0.0), (0.0, 2e-5, 0.0))

EDITS: dict[str, Any] = {
    "a negative number": lambda found: found["forward_s"].__setitem__(0, -1.0),
    "no number": lambda found: found["forward_s"].__setitem__(0, "1"),
    "a truth value": lambda found: found["backward_s"].__setitem__(0, True),
    "not finite": lambda found: found["update_s"].__setitem__(0, float("inf")),
    "nan": lambda found: found["update_s"].__setitem__(0, float("nan")),
    "too large": lambda found: found["update_s"].__setitem__(0, 10**400),
    "too few": lambda found: found["update_s"].pop(),
    "too many": lambda found: found["update_s"].append(0.0),
    "no list": lambda found: found.update(forward_s={"0": 1.0}),
    "missing": lambda found: found.pop("forward_s"),
    "another key": lambda found: found["key"].update(model="another"),
    "another format": lambda found: found.update(format=1),
}

TEXTS = {
    "nothing": b"",
    "half a file": b'{"format": 2, "key": {',
    "no object": b"[1, 2]",
    "no text": b"\xff\xfe\x00",
    "a deep nest": b"[" * 200_000,
    "endless digits": b"9" * 10_000,
}


def test_what_is_kept_is_found_again_by_the_same_key_only(tmp_path: Path) -> None:
    path = place(tmp_path / "deep" / "cache", KEY)
    assert kept(path, KEY, 3) is None
    assert keep(path, KEY, PROFILE)
    assert kept(path, KEY, 3) == PROFILE
    assert kept(path, KEY | {"threads": 2}, 3) is None
    assert kept(path, KEY, 4) is None
    assert place(tmp_path, KEY | {"threads": 2}) != place(tmp_path, KEY) == place(tmp_path, dict(reversed(KEY.items())))


@pytest.mark.parametrize("how", EDITS)
def test_a_file_with_a_wrong_part_counts_as_absent(tmp_path: Path, how: str) -> None:
    path = place(tmp_path, KEY)
    keep(path, KEY, PROFILE)
    found = json.loads(path.read_text())
    EDITS[how](found)
    path.write_text(json.dumps(found))
    assert kept(path, KEY, 3) is None


@pytest.mark.parametrize("what", TEXTS)
def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path: Path, what: str) -> None:
    path = place(tmp_path, KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(TEXTS[what])
    assert kept(path, KEY, 3) is None
    assert keep(path, KEY, PROFILE)
    assert kept(path, KEY, 3) == PROFILE


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = place(tmp_path / "file", KEY)
    assert not keep(path, KEY, PROFILE)
    assert kept(path, KEY, 3) is None
    taken = place(tmp_path, KEY)
    taken.mkdir(parents=True)  # a folder where the file should be
    assert not keep(taken, KEY, PROFILE)
    assert kept(taken, KEY, 3) is None


def test_a_machine_is_known_by_its_processor_and_cores() -> None:
    assert machine() == machine()
    assert machine()["processor"]
    assert machine()["cores"] >= 1
