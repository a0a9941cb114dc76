"""Starts commands by forking a process that has imported everything: a start costs milliseconds, not seconds.

Lines of JSON come in on stdin, one answer goes out on stdout for each:

    {"argv": [...], "folder": "..."}   ->  {"pid": N}       a command, in a process group of its own
    {"wait": N, "seconds": S}          ->  {"status": W}    its wait status; null if it has not ended by then
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch

from roundelay.cli import app


def begin(argv: list[str], folder: str) -> int:
    pid = os.fork()
    if pid:
        while os.getpgid(pid) != pid:  # else whoever looks for the group at once finds nobody in it
            time.sleep(0.0005)
        return pid
    os.setsid()
    os.chdir(folder)
    sys.stdin.close()
    for stream, name in ((1, "out"), (2, "err")):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    tempfile.tempdir = folder
    sys.argv = ["roundelay", *argv]
    app.main()
    raise AssertionError("main returned")


def wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.005)
    return None


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for line in iter(sys.stdin.readline, ""):
        asked: dict[str, Any] = json.loads(line)
        if "wait" in asked:
            answer = {"status": wait(asked["wait"], asked["seconds"])}
        else:
            answer = {"pid": begin(asked["argv"], asked["folder"])}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
