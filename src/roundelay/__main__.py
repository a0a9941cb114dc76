"""``python -m roundelay`` is ``roundelay``, in the form that launchers take."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # until the command listens, Ctrl-C just ends it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from roundelay.cli import main

main()
