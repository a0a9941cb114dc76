"""Transports: how messages and credits travel between workers.

`endpoint` is the interface. `memory` connects threads of one process, `shm` processes of one host, `gloo` processes
over torch.distributed, `grpc` processes that prove who they are, `nccl` processes with a GPU each.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from roundelay.transport.endpoint import ForkedLinks
from roundelay.transport.gloo import forked_over_gloo
from roundelay.transport.grpc_stream import forked_over_grpc
from roundelay.transport.shm import forked_over_shm

Connecting = Callable[[int, float, Mapping[int, int]], AbstractContextManager[ForkedLinks]]
"""From the number of workers, the seconds that a wait may take, and by channel the bytes that its holders may share."""

FORKED: dict[str, Connecting] = {
    "shm": forked_over_shm,
    "gloo": forked_over_gloo,
    "grpc": forked_over_grpc,
}
"""What connects forked workers, by transport. Each whose workers are forked (`roundelay.ir.transports.TRANSPORTS`) is
here."""
