"""The command line: ``roundelay train | plan | simulate | verify``."""

import importlib
import signal


def main() -> None:
    """Entry point. Ctrl-C while torch is still being loaded, which takes seconds, ends the process at once.

    Python's own handler would raise inside the libraries that are being imported, and some of them swallow it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("roundelay.cli.app").main()


__all__ = ["main"]
