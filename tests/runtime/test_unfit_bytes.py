"""A worker whose bytes are no message is the first cause of a run's failure, whoever else has lost whom."""

from __future__ import annotations

import pytest

from roundelay.errors import RoundelayError, UnfitMessageError, WorkerLostError
from roundelay.launching.failure_tracker import FailureTracker
from roundelay.runtime.processes.worker_messages import failure
from roundelay.runtime.workload import Wrap
from roundelay.transport import envelope as envelopes
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.grpc_stream import GrpcEndpoint
from tests.equivalence.cells import VARIANTS, bench


def lost(worker: int) -> WorkerLostError:
    return WorkerLostError(f"worker {worker}", got="its connection broke", expected="life", remedy="None.")


def test_who_was_sent_what_is_no_message_tells_before_who_has_lost_a_worker() -> None:
    tracker = FailureTracker(3, lambda report: None)
    tracker.add(failure(2, lost(1)))
    assert not tracker.is_over(0.0)
    tracker.add(failure(0, lost(1)))
    unfit = UnfitMessageError("worker 2", got="bytes", expected="a message", remedy="None.")
    tracker.add(failure(1, unfit))
    assert tracker.is_over(0.0)
    with pytest.raises(UnfitMessageError, match="worker 2"):
        tracker.raise_failure()


def garbling(worker: int, what: str) -> Wrap:
    """One worker's third frame, and those after it, are no message, in right envelopes or in damaged ones."""

    def wrap(endpoint: Endpoint) -> Endpoint:
        if endpoint.worker == worker:
            assert isinstance(endpoint, GrpcEndpoint)
            post, seal, count = endpoint._post, envelopes.seal, 0

            def garbled(link: object, frame: bytearray, *rest: object, **more: object) -> None:
                nonlocal count
                count += 1
                if count > 2 and what == "frame":
                    frame = bytearray(wire.HEAD_BYTES)
                if count > 2 and what == "bit":
                    envelopes.seal = lambda *given: seal(*given)[:-1] + b"\1"  # type: ignore[assignment]
                post(link, frame, *rest, **more)  # type: ignore[arg-type]

            endpoint._post = garbled  # type: ignore[assignment]
        return endpoint

    return wrap


@pytest.mark.parametrize(
    ("worker", "what", "why"), [(0, "frame", "Head(kind=0"), (1, "frame", "Head(kind=0"), (0, "bit", "damaged")]
)
def test_a_run_over_grpc_ends_by_the_name_of_whoever_sends_no_message(worker: int, what: str, why: str) -> None:
    place = bench("mlp")
    with pytest.raises(RoundelayError) as caught:
        place.verify(place.plan(VARIANTS["1f1b"], 2, 2, "grpc"), wrap=garbling(worker, what))
    assert type(caught.value) is UnfitMessageError
    assert caught.value.subject == f"worker {worker}"
    assert caught.value.got.startswith(f"it sent bytes that are no message ({why}")
