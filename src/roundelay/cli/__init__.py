"""The command line: ``roundelay train | plan | simulate | verify``."""

from roundelay.cli.app import main

__all__ = ["main"]
