"""Runs a program on the stand-in: ``python -m tests.standin [-m MODULE | SCRIPT] ARGUMENTS``.

For example ``python -m tests.standin -m roundelay verify JOB.py --devices cuda:0,cuda:0``.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import tests.standin.device  # noqa: F401  before torch


def main() -> None:
    """Run what the command line names as if it alone had been given to Python."""
    arguments = [word for word in sys.argv[1:] if word != "--"] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit(__doc__)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
