"""The command line: ``roundelay train | plan | simulate | verify``."""

import importlib
import os
import signal
import sys

from roundelay.debug import better_malloc


def main() -> None:
    """Entry point. Ctrl-C while torch is still being loaded, which takes seconds, ends the process at once.

    Python's own handler would raise inside the libraries that are being imported, and some of them swallow it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    environment = better_malloc()
    if environment is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    importlib.import_module("roundelay.cli.app").main()


__all__ = ["main"]
