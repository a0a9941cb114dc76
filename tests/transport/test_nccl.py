"""Messages whose tensors travel on lanes: what is announced, what is made room for, and whom a loss is blamed on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from roundelay.errors import DeadlineError, DivergedError, InternalError, WorkerLostError
from roundelay.planning.planning import capture, plan
from roundelay.proof.run_vs_reference import verify_session
from roundelay.session.training import Length, Session
from roundelay.transport.endpoint import DTYPES, Arrived, Lost, Message
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.nccl_p2p import Lane, LaneDevice, Lanes, Wait, allocate_announced, announce, open_lanes
from tests.api.jobs import make, mlp
from tests.transport.harness import with_lanes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_announced_is_what_room_is_made_for(dtype: torch.dtype) -> None:
    tensors = [torch.empty(shape, dtype=dtype) for shape in ((3, 2), (), (0, 4))]
    frame, parts = announce(Message(4, (1, 2), (7, tensors[0], None, tensors[1], 0.5, tensors[2])), "cpu")
    assert [part.numel() for part in parts] == [6 * dtype.itemsize, dtype.itemsize]
    message, room = allocate_announced(frame, CPU)
    assert (message.channel, message.header) == (4, (1, 2))
    assert [message.values[i] for i in (0, 2, 4)] == [7, None, 0.5]
    made = [message.values[i] for i in (1, 3, 5)]
    assert [(m.shape, m.dtype) for m in made if isinstance(m, torch.Tensor)] == [(t.shape, dtype) for t in tensors]
    assert [r.numel() for r in room] == [part.numel() for part in parts]


def test_tensors_of_other_devices_stay_in_the_frame() -> None:
    tensor = torch.ones(2)
    frame, parts = announce(Message(0, (), (tensor,)), "cuda")
    assert not parts
    assert frame.values[1] is tensor
    assert allocate_announced(frame, CPU)[0].values[0] is tensor


@pytest.mark.parametrize(
    "described",
    [[0], [0, 99, 1, 3], [5, 0, 1, 3], [-1, 0, 1, 3], [0, 0, 99], [0, 0, 2, 3], [0, 0, 1, 2**40], [0, 0, 1, -2]],
)
def test_an_announcement_of_what_cannot_be_is_refused_before_room_is_made(described: list[int]) -> None:
    frame = Message(0, (), (torch.tensor(described), None))
    with pytest.raises(InternalError, match="over NCCL"):
        allocate_announced(frame, CPU)


class Still(Lane):
    """A lane on which nothing moves, and whose waits end when it is aborted."""

    def __init__(self) -> None:
        self.aborted = self.closed = 0
        self.sent: list[torch.Tensor] = []

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        self.sent += parts

    def post(self, parts: Sequence[torch.Tensor]) -> Wait:
        def wait() -> None:
            if self.aborted:
                raise RuntimeError("aborted")

        return wait

    def flush(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.closed += 1

    def abort(self) -> None:
        self.aborted += 1


def joined() -> tuple[list[NcclEndpoint], list[list[Still]]]:
    """Three endpoints in memory, and of each its lanes: to the next two, from the next two."""
    ends, stills = [], []
    for inner in memory_endpoints(3):
        others = [k for k in range(3) if k != inner.worker]
        mine = [Still() for _ in range(4)]
        lanes = Lanes(dict(zip(others, mine[:2], strict=True)), dict(zip(others, mine[2:], strict=True)), [*mine])
        ends.append(NcclEndpoint(inner, lanes, LaneDevice(CPU), 5.0))
        stills.append(mine)
    return ends, stills


def test_a_lost_worker_ends_its_lanes_and_no_other_and_is_told_once() -> None:
    ends, stills = joined()
    ends[1].abort("it had enough")
    lost = ends[0].receive(5.0)
    assert lost == Lost(1, "it had enough")
    assert [lane.aborted for lane in stills[0]] == [1, 0, 1, 0]
    with pytest.raises(DeadlineError):
        ends[0].receive(0.3)
    for end in (ends[0], ends[2]):
        end.abort("over")


def test_an_error_that_follows_a_loss_is_told_as_the_loss() -> None:
    ends, _ = joined()
    odd = DivergedError("the loss", got="nan", expected="a number", remedy="none")
    assert ends[0].cause(odd) is odd
    ends[2].abort("its device failed")
    ends[0].receive(5.0)
    told = ends[0].cause(odd)
    assert isinstance(told, WorkerLostError)
    assert "worker 2" in str(told)
    assert "its device failed" in str(told)
    assert isinstance(ends[2].cause(odd), WorkerLostError)  # what it computes after its own abort means as little
    for end in ends:
        end.abort("over")


def test_a_message_whose_tensors_were_cut_off_never_arrives() -> None:
    ends, stills = joined()
    ends[1].send(0, Message(0, (1,), (5,)))
    ends[1].send(0, Message(0, (2,), (torch.ones(3),)))
    first = ends[0].receive(5.0)
    assert isinstance(first, Arrived)
    assert first.message.header == (1,)
    stills[0][2].abort()
    assert isinstance(ends[0].receive(5.0), Lost)
    for end in ends:
        end.abort("over")


def test_lanes_that_nobody_opens_on_the_other_side_are_given_up() -> None:
    class Alone(Still):
        def send(self, parts: Sequence[torch.Tensor]) -> None:
            raise RuntimeError("nobody came\nto the store")

    with pytest.raises(DeadlineError, match="nobody came"):
        open_lanes(0, [1], lambda name, sends: Alone(), LaneDevice(CPU), 5.0)


def test_lanes_are_opened_in_one_order_by_all() -> None:
    opened: list[tuple[int, str]] = []

    def make(worker: int) -> Callable[[str, bool], Lane]:
        return lambda name, sends: opened.append((worker, name)) or Still()  # type: ignore[func-returns-value]

    for worker, others in ((0, [2, 1]), (1, [2, 0]), (2, [0, 1])):
        lanes = open_lanes(worker, others, make(worker), LaneDevice(CPU), 5.0)
        assert sorted(lanes.to) == sorted(lanes.source) == sorted(others)
    wanted = ["0>1", "1>0", "0>2", "2>0", "1>2", "2>1"]
    for worker in range(3):
        mine = [name for who, name in opened if who == worker]
        assert mine == [name for name in wanted if str(worker) in name]


def session(tmp_path: Path) -> tuple[Session, Any]:
    """Three workers over gloo with lanes beside, and the wrap that opens them."""
    job = make(mlp())
    captured = capture(job)
    chosen = plan(job, workers=3, captured=captured, transport="gloo", devices="cpu", deadline_s=20.0)
    return Session(job, captured, chosen, 0, Length(steps=4)), lambda end: with_lanes(end, 3, tmp_path)


def test_a_run_with_lanes_is_the_reference_bit_for_bit(tmp_path: Path) -> None:
    whole, wrap = session(tmp_path)
    result = verify_session(whole, wrap=wrap)
    assert result.equal, result.difference


def test_a_worker_killed_in_the_middle_is_the_cause_that_is_told(tmp_path: Path) -> None:
    def die(context: Any, run: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    whole, wrap = session(tmp_path)
    with pytest.raises(WorkerLostError, match=r"worker 1 .*SIGKILL"):
        whole.run(notify=lambda event: None, wrap=wrap, handlers={1: {"backward": die}})
