"""One port of each machine is all that others need, a router may pass it on, and who is not reached is told why."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from roundelay.peers import reach
from roundelay.trust.invitation import Invitation
from tests.cli.harness import MLP, finish, one_screen
from tests.cli.harness import here as typed
from tests.conftest import nothing_left_behind
from tests.peers.hosted import PATIENCE_S, hosting
from tests.peers.strangers import from_elsewhere

OTHER = "127.0.0.2"
"""Also an address of this machine, where nothing listens that is only for itself."""


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def listening(processes: Sequence[subprocess.Popen[str]]) -> list[set[tuple[str, int]]]:
    """Where each process has listened until the first, which began before the others, had ended."""
    found = [set[tuple[str, int]]() for _ in processes]
    until = time.monotonic() + PATIENCE_S
    while processes[0].poll() is None and time.monotonic() < until:
        for process, ports in zip(processes, found, strict=True):
            with suppress(psutil.Error):
                sockets = [one.laddr for one in psutil.Process(process.pid).net_connections() if one.status == "LISTEN"]
                ports |= {(at.ip.removeprefix("::ffff:"), at.port) for at in sockets}
        time.sleep(0.02)
    return found


def test_one_port_of_a_machine_is_all_that_others_need_and_a_router_may_pass_it_on(tmp_path: Path) -> None:
    own, port = free_port(OTHER), free_port("127.0.0.1")
    with nothing_left_behind(), from_elsewhere(("127.0.0.1", port), "127.0.0.1") as router:
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 40, "--listen", f"{OTHER}:{own}")
        assert {address for text in run.invitations for address in Invitation.parse(text).addresses} == {(OTHER, own)}
        behind = run.join(0, "--listen", f"127.0.0.1:{port}", "--advertise", "{}:{}".format(*router))
        joined = [behind, run.join(1)]
        open_at = listening([run.host, *joined])
        host, *others = run.ended(joined)
    assert [said.code for said in (host, *others)] == [0, 0, 0], host.err
    assert {at for at in set.union(*open_at) if not at[0].startswith("127.0.0.1")} == {(OTHER, own)}
    assert all(len(ports) > 1 for ports in open_at[:2]), "the servers of those whom others call, on loopback"
    assert (tmp_path / "shared" / "refused.jsonl").read_text() == ""
    assert not any("Refused" in said.err for said in others)


@pytest.mark.parametrize("answers", [False, True], ids=["nobody", "somebody silent"])
def test_whoever_is_not_reached_is_told_where_and_what_to_do(answers: bool, tmp_path: Path) -> None:
    with nothing_left_behind(), socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1] if answers else free_port('127.0.0.1')}"
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 8)
        other, unreached = run.join(1), finish(run.join(0, "--advertise", where))
        run.invited(3)
        host, other_said, instead = run.ended([other, run.join(2)])
    assert [said.code for said in (host, unreached, other_said, instead)] == [0, 2, 0, 0], host.err
    why = "no answer within 15 s" if answers else "Connection refused"
    assert f"worker-1 does not take part: others do not reach it at {where}: {why}" in " ".join(host.err.split())
    one_screen(unreached, f"do not reach it at {where}: {why}", "--listen", "last invitation")
    lines = (tmp_path / "shared" / "refused.jsonl").read_text().splitlines()
    assert [json.loads(line)["reason"] for line in lines] == ["not reached by others"]


def test_the_last_machine_need_not_be_reached(tmp_path: Path) -> None:
    with nothing_left_behind():
        run = hosting(tmp_path, MLP, "--out", "shared", "--steps", 8, peers=2)
        host, last = run.ended([run.join(0, "--advertise", f"127.0.0.1:{free_port('127.0.0.1')}")])
    assert (host.code, last.code) == (0, 0), host.err


def test_a_name_that_no_resolver_takes_is_told_like_any_other() -> None:
    assert asyncio.run(reach._diagnosed(("a..b", 7700)))


@pytest.mark.parametrize("wrong", ["not a host!", "0.0.0.0", "pc.example.org:x", "pc.example.org:99999"])
def test_where_no_machine_can_be_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    one_screen(typed(capsys, "host", MLP, "--peers", 2, "--advertise", wrong), "--advertise", "pc.example.org")
