"""The command line: ``roundelay train | plan | simulate | verify | report | compare | calibrate | doctor``."""

import ctypes
import importlib
import os
import signal
import sys

from roundelay.cli.output_streams import tolerate
from roundelay.env import better_malloc, by_torchrun, launched_as
from roundelay.launching.stop_watchdog import start_watchdog
from roundelay.runtime.processes.child_process import die_with_parent


def main() -> None:
    """Entry point. Ctrl-C while modules are still being loaded ends the process at once.

    Python's own handler would raise inside the libraries that are being imported, and some of them swallow it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tolerate()
    if sys.argv[1:] == ["--version"]:
        importlib.import_module("roundelay.cli.doctor_command").show_version()
        return
    environment = better_malloc()
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    if (name := launched_as()) is not None:
        if by_torchrun():
            die_with_parent(os.getppid(), ctypes.CDLL(None))  # a launcher that is killed tells nobody
        start_watchdog(name)
    try:
        app = importlib.import_module("roundelay.cli.app")
    except Exception as error:  # a package is missing or broken
        sys.exit(importlib.import_module("roundelay.cli.doctor_command").run_without_commands(error))
    app.main()


__all__ = ["main"]
