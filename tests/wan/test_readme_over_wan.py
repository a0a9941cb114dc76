"""README's lines of host and join, typed on three machines with lines of 100 Mbit/s and 40 ms between them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.harness import finish, start
from tests.peers.hosted import PATIENCE_S
from tests.test_readme_runs import HOSTED, JOINED, ROOT, blocks
from tests.wan.bed import Bed, Unusable
from tests.wan.test_host_join_over_wan import invitations, typed


def test_what_readme_types_on_one_machine_is_typed_on_three(tmp_path: Path) -> None:
    page = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    (job,) = (block for block in page if block.file == "my_job.py")
    (lines,) = (block.typed for block in page if HOSTED.search(block.typed))
    (hosts,) = (shlex.split(line, comments=True) for line in HOSTED.findall(lines))
    joins = len(JOINED.findall(lines))
    (verified,) = (
        shlex.split(line, comments=True) for line in re.findall(r"^roundelay verify .*$", lines, re.MULTILINE)
    )
    (tmp_path / "my_job.py").write_text(job.text)
    logs = [tmp_path / f"{peer}.log" for peer in range(joins + 1)]
    try:
        with Bed(peers=joins + 1, mbit_per_s=100, rtt_ms=40) as bed:
            host = typed(bed, 0, tmp_path, logs[0], *hosts[1:], "--listen", bed.address(0))
            found = invitations(host, logs[0], joins)
            others = [
                typed(bed, k, tmp_path / str(k), logs[k], "join", found[k - 1], "--listen", bed.address(k))
                for k in range(1, joins + 1)
            ]
            codes = [process.wait(PATIENCE_S) for process in (host, *others)]
    except Unusable as error:
        pytest.skip(str(error))
    assert codes == [0] * (joins + 1), [log.read_text() for log in logs]
    assert all(not [*(tmp_path / str(k)).iterdir()] for k in range(1, joins + 1)), "a machine that joins has no file"
    said = finish(start(tmp_path, *verified[1:]))
    assert said.code == 0, said.err
    assert "trace = replay: bit-equal: " in said.out
    assert " letters, 0 of " in said.out
