"""A hosted run on machines that declare how many cores they have: what its plan lets each of them compute with."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.ir.plan import Plan
from tests.cli.harness import MLP
from tests.cli.harness import here as typed
from tests.conftest import nothing_left_behind
from tests.peers.hosted import hosting


def declared(cores: int) -> dict[str, str]:
    """The environment of a machine of so many cores, on which nobody has said how many threads there are to be."""
    return {"ROUNDELAY_CORES": str(cores), "OMP_NUM_THREADS": ""}


@pytest.mark.parametrize(("own", "other"), [(4, 4), (4, 2)], ids=["as many", "fewer"])
def test_each_process_has_its_share_of_the_cores_that_its_machine_declares_and_the_run_is_proved(
    own: int, other: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "R", "--steps", 8, peers=2, **declared(own))
        host, one = run.ended([run.join(0, **declared(other))])
    assert (host.code, one.code) == (0, 0), host.err + one.err
    plan = Plan.parse((tmp_path / "R" / "plan.toml").read_text())
    assert [worker.threads for worker in plan.workers] == [own // 2, other // 2]
    said = typed(capsys, "verify", MLP, "--trace", tmp_path / "R")
    assert (said.code, "trace = replay: bit-equal" in said.out) == (0, True), said.err
