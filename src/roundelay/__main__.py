"""``python -m roundelay`` is ``roundelay``: the form that launchers take, ``torchrun ... -m roundelay train JOB.py``."""

from roundelay.cli import main

main()
