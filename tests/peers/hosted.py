"""A hosted run on one machine: a process that hosts, and one for each machine that joins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cli.harness import PROGRAM, ROOT, Said, finish, start

INVITATION = re.compile(r"roundelay-1-[a-z2-7]+")
PATIENCE_S = 90.0


@dataclass(slots=True)
class Hosted:
    """A host that has printed its invitations.

    Args:
        host: its process.
        invitations: that it has printed.
        folder: where it runs.
        log: what it has printed so far.
    """

    host: subprocess.Popen[str]
    invitations: list[str]
    folder: Path
    log: Path

    def join(self, number: int, *args: object, **env: str) -> subprocess.Popen[str]:
        """Start a machine with an invitation, in a folder of its own, without the job's path."""
        folder = self.folder / f"machine-{number}"
        folder.mkdir(exist_ok=True)
        return joining(folder, self.invitations[number], *args, **env)

    def invited(self, count: int) -> None:
        """Wait until there are so many invitations in all."""
        until = time.monotonic() + PATIENCE_S
        while len(found := INVITATION.findall(self.log.read_text())) < count:
            assert self.host.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)
        self.invitations[:] = found

    def ended(self, joined: Sequence[subprocess.Popen[str]]) -> list[Said]:
        """What the host and the others said, when all have ended."""
        said = [finish(self.host, PATIENCE_S), *[finish(one, PATIENCE_S) for one in joined]]
        return [Said(said[0].code, said[0].out, self.log.read_text()), *said[1:]]


def joining(folder: Path, *args: object, **env: str) -> subprocess.Popen[str]:
    """Start ``roundelay join`` where nothing of a job is."""
    known = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "join", *map(str, args)],
        cwd=folder,
        env=known,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def hosting(folder: Path, job: object, *args: object, peers: int = 3, **env: str) -> Hosted:
    """Start a host, and wait for its invitations."""
    log = folder / "host.log"
    with log.open("w") as written:
        host = start(folder, "host", job, "--peers", peers, *args, stderr=written, **env)
    run = Hosted(host, [], folder, log)
    run.invited(peers - 1)
    return run
