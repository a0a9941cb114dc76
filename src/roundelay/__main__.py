"""``python -m roundelay`` is ``roundelay``, in the form that launchers take."""

from roundelay.cli import main

main()
