"""Three machines with lines of 100 Mbit/s and 40 ms between them: one hosts, two join, and the run is proved."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.ir.plan import Plan
from tests.cli.harness import MLP, PROGRAM, environment, finish, start
from tests.peers.hosted import INVITATION, PATIENCE_S
from tests.wan.bed import Bed, Unusable

MBIT_PER_S, RTT_MS, STEPS = 100, 40, 60


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Skips, and says why, where there can be no bed."""
    try:
        with Bed(peers=3, mbit_per_s=MBIT_PER_S, rtt_ms=RTT_MS) as made:
            yield made
    except Unusable as error:
        pytest.skip(str(error))


def typed(bed: Bed, peer: int, folder: Path, log: Path, *args: object) -> subprocess.Popen[str]:
    """Type a command on a machine."""
    folder.mkdir(exist_ok=True)
    with log.open("w") as written:
        return bed.popen(
            peer,
            [sys.executable, "-c", PROGRAM, *map(str, args)],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=written,
            text=True,
        )


def hosting(bed: Bed, folder: Path, log: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """Host a run on the first machine; returns its process and the invitations."""
    given = "--peers", 3, "--listen", bed.address(0), "--out", folder / "shared", "--steps", STEPS
    host = typed(bed, 0, folder / "host", log, "host", MLP, *given)
    return host, invitations(host, log, 2)


def invitations(host: subprocess.Popen[str], log: Path, count: int) -> list[str]:
    """What a host has printed, once there are so many in all."""
    until = time.monotonic() + PATIENCE_S
    while len(found := INVITATION.findall(log.read_text())) < count:
        assert host.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    return found


def test_a_run_over_slow_lines_is_planned_for_them_and_proved(bed: Bed, tmp_path: Path) -> None:
    logs = [tmp_path / f"{peer}.log" for peer in range(3)]
    host, found = hosting(bed, tmp_path, logs[0])
    others = [
        typed(bed, peer, tmp_path / str(peer), logs[peer], "join", found[peer - 1], "--listen", bed.address(peer))
        for peer in (1, 2)
    ]
    codes = [process.wait(PATIENCE_S) for process in (host, *others)]
    assert codes == [0, 0, 0], [log.read_text() for log in logs]
    told = " ".join(logs[0].read_text().split())
    measured = [float(rtt) for rtt in re.findall(r"Mbit/s, ([\d.]+) ms", told)]
    assert len(measured) == 2
    assert all(rtt >= 0.9 * RTT_MS for rtt in measured), told
    plan = Plan.parse((tmp_path / "shared" / "plan.toml").read_text())
    assert all(edge.latency_s >= 0.45e-3 * RTT_MS for edge in plan.edges)
    assert plan.stages[0].in_flight > plan.num_stages + 1, "more than where messages take no time"
    said = finish(start(tmp_path, "verify", MLP, "--trace", "shared"))
    assert said.code == 0, said.err
    assert f"trace = replay: bit-equal: {3 * 2 * STEPS} letters, 0 of " in said.out


def test_a_machine_that_must_be_reached_and_listens_to_itself_alone_is_refused_and_may_come_again(
    bed: Bed, tmp_path: Path
) -> None:
    logs = [tmp_path / f"{peer}.log" for peer in range(3)]
    host, found = hosting(bed, tmp_path, logs[0])
    refused, last = (typed(bed, k, tmp_path / str(k), logs[k], "join", found[k - 1]) for k in (1, 2))
    assert refused.wait(PATIENCE_S) == 2, logs[1].read_text()
    assert "--listen" in logs[1].read_text()
    again = invitations(host, logs[0], 3)[2]
    second = typed(bed, 1, tmp_path / "1", tmp_path / "again.log", "join", again, "--listen", bed.address(1))
    codes = [process.wait(PATIENCE_S) for process in (host, second, last)]
    assert codes == [0, 0, 0], [log.read_text() for log in logs]
    assert "worker-1 does not take part: others do not reach it" in logs[0].read_text()


WIDE = """
import torch
import roundelay


def job(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    data = [(torch.randn(512, 8), torch.randn(512, 1)) for _ in range(8)]
    loss = lambda out, batch: torch.nn.functional.mse_loss(out, batch[1])
    made = lambda named: torch.optim.SGD(named, lr=0.01)
    return roundelay.Job(model=model, loss=loss, batches=lambda epoch: data, optimizer=made)
"""


def test_messages_of_a_megabyte_over_an_uplink_of_5_mbit_s_are_not_taken_for_silence(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    try:
        with Bed(peers=2, mbit_per_s=5, rtt_ms=RTT_MS) as bed:
            given = "--peers", 2, "--listen", bed.address(0), "--cuts", "relu", "--steps", 8, "--out", "r"
            host = typed(bed, 0, tmp_path, logs[0], "host", "wide.py", *given)
            (found,) = invitations(host, logs[0], 1)
            other = typed(bed, 1, tmp_path, logs[1], "join", found)
            assert [process.wait(PATIENCE_S) for process in (host, other)] == [0, 0], [log.read_text() for log in logs]
    except Unusable as error:
        pytest.skip(str(error))
    plan = Plan.parse((tmp_path / "r" / "plan.toml").read_text())
    assert plan.edges[0].forward_bytes >= 2**20
    assert plan.edges[0].bytes_per_s < 1e6
