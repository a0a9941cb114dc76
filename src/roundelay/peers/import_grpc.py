"""Imports gRPC when it is needed: a process that has used it must not fork."""

from __future__ import annotations

from typing import Any

from roundelay import env
from roundelay.optional_packages import optional

_NEEDED = ("joining machines", "roundelay[join]", ".")


def import_grpc() -> Any:
    """Return the module ``grpc``, with ``grpc.aio``; it prints nothing of its own.

    Raises:
        UsageError: it is not installed.
    """
    env.set_default("GRPC_VERBOSITY", "NONE")
    optional("grpc.aio", *_NEEDED)
    return optional("grpc", *_NEEDED)
