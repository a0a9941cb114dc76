"""A hosted run on this machine: `roundelay host` and `roundelay join` as typed, and a job small enough to wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from roundelay.trust.authority import Authority
from roundelay.trust.invitation import Invitation

ROOT = Path(__file__).resolve().parents[2]
INVITATION = re.compile(r"roundelay-1-\w+")
START_S, RUN_S = 120.0, 150.0
"""Seconds that may pass until all have joined, and then until all have ended, on a loaded machine."""

JOB = """
import time, torch, roundelay
from torch import nn
from sklearn.datasets import load_digits

def job(seed=0):
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def batches(epoch):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(32):
            time.sleep(PAUSE_S)
            yield x[rows], y[rows]

    return roundelay.Job(
        model=model,
        loss=lambda out, batch: nn.functional.cross_entropy(out, batch[1]),
        batches=batches,
        inputs=lambda batch: ((batch[0],), {}),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
"""

TELLS = """
import sys
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from roundelay.cli import host_command, main
made = host_command.new_authority

def told(*given):
    authority = made(*given)
    key = authority.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    open("authority", "wb").write(key + authority.certificate)
    return authority

def told_members(*given):
    members = Members(*given)
    open("members", "w").write("{} {}".format(*given[1].address))
    return members

Members, host_command.Members = host_command.Members, told_members
host_command.new_authority = told
main()
"""
"""What a host runs that tells this test the key of its authority, and where the members' service listens."""


@dataclass
class Hosted:
    """A run that is going on.

    Args:
        folder: where the host was typed, with the job file.
        host: its process.
        invitations: those it has printed.
        joiners: processes of those who join.
        others: processes of those who try.
    """

    folder: Path
    host: subprocess.Popen[bytes]
    invitations: list[str]
    joiners: list[subprocess.Popen[bytes]] = field(default_factory=list)
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "R"

    def told(self, name: str = "host") -> str:
        """What a machine has written on stderr."""
        return (self.folder / f"{name}.err").read_text()

    def join(
        self, invitation: str, name: str, code: str = "", *options: str, under: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Type it in an empty folder, under another program if need be; `code` runs before."""
        (self.folder / name).mkdir()
        source = f"{code}\nfrom roundelay.cli import main\nmain()\n"
        command = [*under, sys.executable, "-c", source, "join", invitation, *options]
        with (self.folder / f"{name}.err").open("wb") as err:
            return popen(command, self.folder / name, err)

    def authority(self) -> Authority:
        """The run's authority, with its key."""
        text = (self.folder / "authority").read_bytes()
        end = b"-----END PRIVATE KEY-----\n"
        key, certificate = text.partition(end)[::2]
        names = x509.load_pem_x509_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        now = datetime.now(UTC) - timedelta(minutes=10)
        return Authority(
            str(names[0].value), now, timedelta(days=1), load_pem_private_key(key + end, None), certificate
        )

    def door(self) -> tuple[str, int]:
        """Where the door listens."""
        return Invitation.parse(self.invitations[0]).addresses[0]

    def members(self) -> tuple[str, int]:
        """Where the members' service listens."""
        host, port = (self.folder / "members").read_text().split()
        return host, int(port)

    def trains(self) -> None:
        """Wait until updates are made."""
        metrics = self.out / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size > 2000, START_S, self)

    def end(self) -> list[int]:
        """Exit codes of the host and of the joiners, in order."""
        return [process.wait(RUN_S) for process in (self.host, *self.joiners)]


def popen(command: list[str], cwd: Path, err: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=cwd, env=env, stderr=err, **({"stdout": subprocess.DEVNULL} | more))


def until(there: Any, seconds: float, run: Hosted) -> None:
    """Wait for something; a host that has ended will not bring it."""
    deadline = time.monotonic() + seconds
    while not there():
        assert run.host.poll() is None, run.told()
        assert time.monotonic() < deadline, run.told()
        time.sleep(0.1)


@contextmanager
def hosted(folder: Path, steps: int, peers: int = 3, *options: str, pause_s: float = 0.0) -> Iterator[Hosted]:
    """Host a run, whose invitations are printed and not used yet; whoever is left at the end is killed.

    Each batch takes `pause_s`, so that a run of so many steps lasts on a fast machine too.
    """
    (folder / "job.py").write_text(JOB.replace("PAUSE_S", f"{pause_s}"))
    typed = ["host", "job.py", "--peers", str(peers), "--out", "R", "--steps", str(steps), "--wait-s", "200", *options]
    with (folder / "host.err").open("wb") as err:
        run = Hosted(folder, popen([sys.executable, "-c", TELLS, *typed], folder, err), [])
    try:
        until(lambda: len(INVITATION.findall(run.told())) == peers - 1, START_S, run)
        run.invitations = INVITATION.findall(run.told())
        yield run
    finally:
        for process in (run.host, *run.joiners, *run.others):
            if process.poll() is None:
                process.kill()
            process.wait()
