"""A hosted run goes on, and is proved afterwards, while strangers come to every port of every machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from roundelay.membership import roster
from roundelay.peers import members, refusals
from roundelay.peers.listener import LOOPBACK
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.member_store import MemberStore
from roundelay.peers.members import HOST_NAME
from roundelay.transport import envelope as envelopes
from roundelay.transport import grpc_stream
from roundelay.trust.certificates import domain_of
from tests.peers.attacks import GET, LINK, Port, at_door, frames, hello, strangers
from tests.peers.strangers import WAIT_S, in_child
from tests.peers.told_run import RUN_S, Hosted, hosted, popen

UNCERTIFIED = {
    "no certificate": refusals.UNCERTIFIED,
    "foreign authority": refusals.UNCERTIFIED,
    "expired": refusals.UNCERTIFIED,
    "plaintext": refusals.PLAINTEXT,
    "bare pickle": refusals.PLAINTEXT,
}
AT_MEMBERS = UNCERTIFIED | {
    "wrong role": members.ROLE,
    "pickle": members.UNREADABLE,
    "oversize": members.OVERSIZE,
}
AT_ENDPOINT = UNCERTIFIED | {
    "wrong role": grpc_stream.ROLE,
    "pickle": envelopes.FOREIGN,
    "oversize": envelopes.OVERSIZE,
    "truncated frame": envelopes.TRUNCATED,
    "flipped bit": envelopes.DAMAGED,
    "skipped frame": envelopes.SKIPPED,
    "oversize header": envelopes.OVERSIZE,
    "another's name": envelopes.MISNAMED,
    "unknown worker": envelopes.MISNAMED,
    "replayed frame": envelopes.TAKEN,
}
AT_DOOR = {
    "pickle": refusals.UNREADABLE,
    "oversize": refusals.OVERSIZE,
    "wrong method": refusals.UNKNOWN_METHOD,
    "another server": refusals.UNKNOWN_SERVICE,
    "plaintext": refusals.PLAINTEXT,
    "bare pickle": refusals.PLAINTEXT,
}
"""By what is sent, the reason that is written down."""

UNTOLD = {"", "UNAVAILABLE"}
"""What those hear who do not prove who they are: TLS ends the connection."""


def ports(run: Hosted) -> dict[str, Port]:
    """The listeners of all machines but the door, as a certified worker that is not of the run can ask for them."""
    loop, own = LoopThread("peers"), run.authority().issue("worker-9")
    store = MemberStore(run.members(), own, "worker-9", loop)
    found = {"members": Port(run.members(), HOST_NAME, GET, b"data 0 worker-0", 1)}
    for kind, server, caller in (("data", 0, 1), ("reports", 0, 2), ("news", 0, 1), ("data", 1, 2)):
        host, _, port = store.get(f"{kind} 0 worker-{server}", WAIT_S).rpartition(":")
        name = f"{kind}-0.{domain_of(f'worker-{server}')}"
        found[f"{kind} of {server}"] = Port((host, int(port)), name, LINK, hello(caller), caller)
    store.close()
    loop.close()
    return found


def attacked(run: Hosted) -> dict[str, dict[str, str]]:
    """How each port has answered each attack."""
    authority, outcomes = run.authority(), {"door": at_door(run.door())}
    for name, port in ports(run).items():
        outcomes[name] = strangers(port, authority) | (frames(port, authority) if port.method == LINK else {})
    return outcomes


def written(run: Hosted) -> list[str]:
    """The reasons that the host has written down."""
    lines = [json.loads(line) for line in (run.out / "refused.jsonl").read_text().splitlines()]
    assert all(set(line) == {"time", "peer", "reason"} and LOOPBACK in line["peer"] for line in lines)
    return [line["reason"] for line in lines]


def listening(run: Hosted) -> set[str]:
    """The addresses at which the machines listen; strangers reach those of one port of each."""
    found = [at for own in (run.host, *run.joiners) for at in psutil.Process(own.pid).net_connections("inet")]
    return {at.laddr.ip.removeprefix("::ffff:") for at in found if at.status == psutil.CONN_LISTEN}


@pytest.mark.timeout(400)
def test_strangers_at_every_port_are_refused_and_the_run_is_proved_afterwards(tmp_path: Path) -> None:
    with hosted(tmp_path, 1200, pause_s=0.05) as run:
        for k, invitation in enumerate(run.invitations, 1):
            run.joiners.append(run.join(invitation, f"joiner {k}"))
        run.trains()
        again = run.join(run.invitations[0], "again")
        run.others.append(again)
        outcomes = in_child(lambda: attacked(run))
        assert listening(run) == {LOOPBACK}
        assert again.wait(RUN_S) == 2
        assert run.host.poll() is None, "the run was over before the attacks were"
        assert run.end() == [0, 0, 0], run.told()
    expected = {"door": AT_DOOR, "members": AT_MEMBERS}
    for name, told in outcomes.items():
        reasons = expected.get(name, AT_ENDPOINT)
        assert {what: reasons[what] if said in UNTOLD else said for what, said in told.items()} == reasons, name
    due = Counter(r for name in outcomes if name != "data of 1" for r in expected.get(name, AT_ENDPOINT).values())
    assert Counter(written(run)) == due + Counter([roster.USED])
    lines = re.findall(r"^Refused 127\.0\.0\.1:\d+: (.*)\.$", run.told("joiner 1"), re.MULTILINE)
    assert Counter(lines) == Counter(AT_ENDPOINT.values())
    assert "Refused" not in run.told("joiner 2")
    assert not any("Traceback" in run.told(name) for name in ("host", "joiner 1", "joiner 2", "again"))
    assert "invitation already used" in run.told("again")
    assert proved(run) == "bit-equal"


def proved(run: Hosted) -> str:
    """What verify says of the trace."""
    command = [sys.executable, "-m", "roundelay", "verify", "job.py", "--trace", "R"]
    with (run.folder / "verify.err").open("wb") as err:
        verify = popen(command, run.folder, err, stdout=subprocess.PIPE)
    told = verify.communicate(timeout=RUN_S)[0].decode()
    assert verify.returncode == 0, told + run.told("verify")
    return "bit-equal" if "bit-equal" in told else told
