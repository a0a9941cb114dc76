"""What holds of test beds where there can be none: they say what is missing; and what can be known without one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.wan import namespaces, wire
from tests.wan.bed import Bed, Unusable


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else f"/bin/{tool}")
    with pytest.raises(Unusable, match=r"no nft on PATH.*apt install nftables\."), Bed(1):
        pass


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unusable, match=r"no root on Linux.*Run as root\."), Bed(1):
        pass


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_written_as_each_version_of_control_groups_wants_it(version: int, tmp_path: Path) -> None:
    group = tmp_path / "a" if version == 2 else tmp_path / "cpu" / "a"
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
    else:
        (tmp_path / "cpu").mkdir()
    namespaces.set_quota("a", 0.4, tmp_path)
    assert namespaces.quota_file("a", tmp_path) == group / "cgroup.procs"
    written = {path.name: path.read_text() for path in group.iterdir()}
    one = {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "8000"}
    assert written == (one if version == 1 else {"cpu.max": "8000 20000"})


def test_without_control_groups_a_quota_is_refused(tmp_path: Path) -> None:
    with pytest.raises(namespaces.Lacking, match="control groups with CPU quotas"):
        namespaces.set_quota("a", 0.4, tmp_path)


@pytest.mark.parametrize(("data", "expected"), [(100, 152), (1448, 1500), (1449, 1553), (2896, 3000), (2897, 3053)])
def test_a_large_packet_counts_as_the_packets_that_a_wire_would_carry(data: int, expected: int) -> None:
    segment = 1448 if data > 1448 else 0
    before = wire._BEFORE_IP.pack(1, 1 if segment else 0, 52 if segment else 0, segment, 20, 16)
    assert wire.wire_bytes(before + bytes(52 + data)) == expected
