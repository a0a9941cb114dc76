"""Signals that another thread is given: Python handles them in the main thread, which may mask them."""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def handled(number: signal.Signals, handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Have a signal handled so, by an interrupt unless told otherwise."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def bystander() -> Iterator[threading.Thread]:
    """A thread that does nothing and masks no signal."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def give(thread: threading.Thread, number: signal.Signals) -> None:
    """Send a signal that has a handler to a thread, and wait until it has taken it."""
    hearing, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno())
    try:
        signal.pthread_kill(cast(int, thread.ident), number)
        assert select.select([hearing], [], [], 10.0)[0]
    finally:
        signal.set_wakeup_fd(before)
        hearing.close()
        told.close()
