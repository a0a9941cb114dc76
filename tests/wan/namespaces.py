"""The namespaces and CPU quotas of test beds: their names, how to enter them, and how to remove them.

The name of each carries the process that carries its bed's packets; that process removes them. Where it was killed, the
next bed to begin does.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAMES = Path("/run/netns")
CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/ns/net")
WIRE = "tests.wan.wire"
"""The module by whose name a process that carries a bed is known."""

PERIOD_US = 20_000
"""A quota's period: short, so that a peer of 0.2 of a core answers within 20 ms."""

END_S = 5.0
"""Seconds that processes may take to die, and then groups to be empty."""

_NAME = re.compile(r"roundelay-(\d+)-\d+")
_CLONE_NEWNET = 0x40000000


class Lacking(Exception):
    """What is missing here, and what to do about it."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy


def name_of(wire: int, peer: int) -> str:
    """The name of the namespace, and of the CPU quota, of one peer of the bed that the process `wire` carries."""
    return f"roundelay-{wire}-{peer}"


def run(*argv: str, text: str = "", lacking: str, remedy: str) -> None:
    """Run a command of the system; raise Lacking if it fails."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise Lacking(f"{lacking} ({' '.join(argv)}: {done.stderr.strip()})", remedy)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Let the calling thread work in a namespace; the sockets that it makes meanwhile stay there."""
    with OWN.open() as own, (NAMES / name).open() as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def quota_file(name: str, root: Path = CGROUPS) -> Path:
    """The file into which a process writes its number to be held to a quota; of version 1 or 2, as the machine has."""
    return (root if (root / "cgroup.controllers").exists() else root / "cpu") / name / "cgroup.procs"


def set_quota(name: str, cores: float, root: Path = CGROUPS) -> None:
    """Make a group whose processes together have so many cores, a fraction say.

    Raises:
        Lacking: the machine's control groups hold no CPU quotas, or may not be changed.
    """
    folder, quota = quota_file(name, root).parent, round(cores * PERIOD_US)
    try:
        folder.mkdir()
        if folder.parent == root:
            (root / "cgroup.subtree_control").write_text("+cpu")
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        remedy = "Mount the cpu controller there, writable, of version 1 or 2; or give no `cores`."
        raise Lacking(f"control groups with CPU quotas in {root} ({error})", remedy) from error


def names() -> set[str]:
    """All namespaces and quotas of beds on this machine."""
    folders = (NAMES, quota_file("-").parent.parent)
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if _NAME.match(path.name)}


def remove(own: int | None = None) -> None:
    """Kill what runs in namespaces whose bed's process is dead, or is `own`, and remove them and their quotas."""
    for name in names():
        wire = int(name.split("-")[1])
        if wire == own or WIRE not in _read(Path(f"/proc/{wire}/cmdline")):
            _remove(name)


def _remove(name: str) -> None:
    deadline = time.monotonic() + END_S
    while _kill_all(name) and time.monotonic() < deadline:
        time.sleep(0.005)
    if (NAMES / name).exists():
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20, check=False)
    group = quota_file(name).parent
    while group.exists() and time.monotonic() < deadline:
        with suppress(OSError):  # a process that was killed is still in it
            group.rmdir()
        time.sleep(0.005)


def _kill_all(name: str) -> int:
    """Kill the processes in a namespace; how many there were."""
    killed = 0
    with suppress(FileNotFoundError):
        there = os.stat(NAMES / name)
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                process = os.pidfd_open(int(entry.name))
                try:
                    if os.path.samestat(os.stat(entry / "ns" / "net"), there):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                        killed += 1
                finally:
                    os.close(process)
    return killed


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
