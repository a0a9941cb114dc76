"""A hosted run on machines that declare how many cores they have: what its plan lets each of them compute with."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.ir.plan import Plan
from tests.cli.harness import MLP
from tests.conftest import nothing_left_behind
from tests.peers.hosted import hosting


def declared(cores: int) -> dict[str, str]:
    """The environment of a machine of so many cores, on which nobody has said how many threads there are to be."""
    return {"ROUNDELAY_CORES": str(cores), "OMP_NUM_THREADS": ""}


@pytest.mark.parametrize(("own", "other", "threads"), [(4, 4, 2), (4, 2, 1)], ids=["as many", "fewer"])
def test_processes_of_one_machine_share_the_cores_that_it_declares(
    own: int, other: int, threads: int, tmp_path: Path
) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "R", "--steps", 8, peers=2, **declared(own))
        host, one = run.ended([run.join(0, **declared(other))])
    assert (host.code, one.code) == (0, 0), host.err + one.err
    assert Plan.parse((tmp_path / "R" / "plan.toml").read_text()).threads == threads
