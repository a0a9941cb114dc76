"""Workers that are forked as `roundelay train` does, each on a peer of the test bed: only their links are replaced."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

from roundelay.transport import FORKED, Connecting
from roundelay.transport.endpoint import Endpoint, ForkedLinks
from roundelay.transport.framed_endpoint import rendezvous_file
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.grpc_member import Member, name_of
from roundelay.transport.grpc_stream import VALID, GrpcEndpoint
from roundelay.transport.meeting import FileMeeting
from roundelay.trust.authority import new_authority
from tests.wan.bed import Bed
from tests.wan.wire import DEVICE

MOST_PEERS = 8

Open = Callable[[int, int, str, float], Endpoint]
"""From a worker's number, how many there are, a file to meet at and a deadline to its end."""

_STAYS = ExitStack()
"""Where a worker's thread, and all that it starts, is until its process ends."""


def on_peers(bed: Bed, open_end: Open) -> Connecting:
    """Connect forked workers, each on its peer.

    Args:
        bed: entered.
        open_end: opens a worker's end.
    """

    @contextmanager
    def connecting(workers: int, deadline_s: float, _: object) -> Generator[ForkedLinks, None, None]:
        with rendezvous_file() as path:

            def connected(worker: int) -> Endpoint:
                _STAYS.enter_context(bed.inside(worker))
                return open_end(worker, workers, path, deadline_s)

            yield ForkedLinks(connected, lambda: None)

    return connecting


def over_grpc(bed: Bed) -> Connecting:
    """As :func:`roundelay.transport.grpc_stream.forked_over_grpc`, each worker on its peer."""
    authority = new_authority("roundelay", datetime.now(UTC), VALID)
    own = [authority.issue(name_of(k)) for k in range(MOST_PEERS)]

    def open_end(worker: int, workers: int, path: str, deadline_s: float) -> Endpoint:
        member = Member(own[worker], FileMeeting(path, workers, deadline_s), host=bed.address(worker))
        return GrpcEndpoint(worker, range(workers), member, deadline_s)

    return on_peers(bed, open_end)


def over_our_gloo(bed: Bed) -> Connecting:
    """As :func:`roundelay.transport.gloo.forked_over_gloo`, each worker on its peer."""
    return on_peers(
        bed, lambda worker, workers, path, deadline_s: GlooEndpoint(worker, workers, path, deadline_s, DEVICE)
    )


@contextmanager
def replaced(transport: str, connecting: Connecting) -> Generator[None, None, None]:
    """Connect the forked workers of a transport in another way."""
    before = FORKED[transport]
    FORKED[transport] = connecting
    try:
        yield
    finally:
        FORKED[transport] = before
