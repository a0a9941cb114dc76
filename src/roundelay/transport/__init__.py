"""Transports: how messages and credits travel between workers.

`endpoint` is the interface. `memory` connects threads of one process, `shm` processes of one host, `gloo` processes
over torch.distributed, `nccl` processes with a GPU each.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from roundelay.transport.endpoint import ForkedLinks
from roundelay.transport.gloo import forked_over_gloo
from roundelay.transport.shm import forked_over_shm

FORKED: dict[str, Callable[[int, float], AbstractContextManager[ForkedLinks]]] = {
    "shm": forked_over_shm,
    "gloo": forked_over_gloo,
}
"""What connects forked workers, by transport, from the number of workers and the seconds that a wait may take. Each
transport whose workers are forked (`roundelay.ir.transports.TRANSPORTS`) is here."""
