"""What every transport promises, held against each of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from roundelay.errors import DeadlineError, InternalError, WorkerLostError
from roundelay.transport.endpoint import DTYPES, Arrived, Delivery, Endpoint, Granted, Lost, Message, Value
from tests.transport.harness import DIED, KINDS, Body, die, run_workers

WAIT_S = 20.0
SHAPES = ((), (0,), (0, 3), (2, 0, 5), (1,), (3, 4), (1,) * 16, (257, 129))
Run = Callable[[Sequence[Body]], list[Any]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str, tmp_path: Path) -> Run:
    return lambda bodies: run_workers(kind, bodies, tmp_path)


def message(endpoint: Endpoint) -> Message:
    delivery = endpoint.receive(WAIT_S, credits=False)
    assert isinstance(delivery, Arrived), delivery
    return delivery.message


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(a: Value, b: Value) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and raw(a) == raw(b)
    return (
        type(a) is type(b) and (a == b or (a != a and b != b)) and math.copysign(1, a or 0) == math.copysign(1, b or 0)
    )


def all_tensors() -> tuple[torch.Tensor, ...]:
    """Each dtype in each shape, filled with any bits at all, not-a-numbers included."""
    made = []
    source = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        for shape in SHAPES:
            count = math.prod(shape) * dtype.itemsize
            bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=source, dtype=torch.uint8)
            made.append(bits.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype))
    return tuple(made)


def test_every_dtype_and_shape_arrives_bit_for_bit(run: Run) -> None:
    tensors = all_tensors()

    def send(endpoint: Endpoint) -> None:
        endpoint.send(1, Message(0, (), tensors))
        for tensor in tensors:
            endpoint.send(1, Message(0, (), (tensor,)))

    def receive(endpoint: Endpoint) -> None:
        together = message(endpoint).values
        alone = [message(endpoint).values for _ in tensors]
        for sent, first, second in zip(tensors, together, alone, strict=True):
            assert same(sent, first), (sent.dtype, sent.shape)
            assert same(sent, second[0]), (sent.dtype, sent.shape)

    run([send, receive])


def test_numbers_and_nothing_arrive_exactly_and_in_place(run: Run) -> None:
    header = (0, -1, 2**63 - 1, -(2**63), *range(12))
    odd = (
        None,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        0.0,
        -0.0,
        0.1,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
    )
    values = (*odd, torch.tensor(3), None, 2**53 + 1, torch.tensor(2.5))

    def receive(endpoint: Endpoint) -> None:
        got = message(endpoint)
        assert got.header == header
        assert got.channel == 7
        assert len(got.values) == len(values)
        assert all(map(same, got.values, values)), got.values
        assert message(endpoint) == Message(2**31 - 1, (), ())

    def send(endpoint: Endpoint) -> None:
        endpoint.send(1, Message(7, header, values))
        endpoint.send(1, Message(2**31 - 1, (), ()))

    run([send, receive])


def test_a_message_of_very_many_values_arrives_whole(run: Run) -> None:
    values: tuple[Value, ...] = (*map(float, range(20_000)), torch.ones(3), torch.empty(0), torch.ones(90_000))

    def receive(endpoint: Endpoint) -> None:
        got = message(endpoint).values
        assert got[:20_000] == values[:20_000]
        assert all(map(same, got[20_000:], values[20_000:]))
        assert message(endpoint).header == (1,)

    def send(endpoint: Endpoint) -> None:
        endpoint.send(1, Message(0, (), values))
        endpoint.send(1, Message(0, (1,), ()))

    run([send, receive])


def test_a_message_keeps_its_content_when_later_ones_arrive(run: Run) -> None:
    def receive(endpoint: Endpoint) -> None:
        kept = [message(endpoint).values[0] for _ in range(20)]
        assert all(same(value, torch.full((50,), i)) for i, value in enumerate(kept))

    def send(endpoint: Endpoint) -> None:
        for i in range(20):
            endpoint.send(1, Message(0, (), (torch.full((50,), i),)))

    run([send, receive])


def test_many_messages_both_ways_at_once_keep_their_order_and_none_is_lost(run: Run) -> None:
    count, channels = 150, 3

    def chat(endpoint: Endpoint) -> dict[str, list[int]]:
        others = [k for k in range(3) if k != endpoint.worker]
        for i in range(count):
            for other in others:
                size = 30_000 if i % 16 == 0 else i % 7
                endpoint.send(other, Message(i % channels, (i,), (torch.full((size,), i), i)))
                endpoint.grant(other, 100 + i % channels)
        seen: dict[str, list[int]] = {}
        for _ in range(2 * 2 * count):
            delivery = endpoint.receive(WAIT_S)
            assert isinstance(delivery, Arrived | Granted)
            if isinstance(delivery, Arrived):
                got = delivery.message
                tensor = got.values[0]
                assert isinstance(tensor, torch.Tensor)
                assert bool((tensor == got.header[0]).all())
                seen.setdefault(f"{delivery.source}:{got.channel}", []).append(got.header[0])
            else:
                seen.setdefault(f"{delivery.source}:{delivery.channel}", []).append(-1)
        with pytest.raises(DeadlineError):
            endpoint.receive(0.0)
        return seen

    for worker, seen in enumerate(run([chat] * 3)):
        for other in {0, 1, 2} - {worker}:
            for channel in range(channels):
                assert seen[f"{other}:{channel}"] == list(range(channel, count, channels))
                assert seen[f"{other}:{100 + channel}"] == [-1] * (count // channels)


def test_big_tensors_both_ways_at_once_pass_each_other(run: Run) -> None:
    def swap(endpoint: Endpoint) -> None:
        other = 1 - endpoint.worker
        big = torch.arange(2**21, dtype=torch.int32)
        for i in range(3):
            endpoint.send(other, Message(0, (i,), (big + i + endpoint.worker, big)))
        for i in range(3):
            got = message(endpoint)
            assert same(got.values[0], big + i + other)
            assert same(got.values[1], big)

    run([swap, swap])


def test_sending_waits_for_nobody(run: Run) -> None:
    """The receiver takes nothing before the sender has sent all of it and told so."""

    def send(endpoint: Endpoint) -> None:
        for i in range(40):
            endpoint.send(1, Message(0, (i,), (torch.ones(2**17),)))
        endpoint.send(2, Message(1, (), ()))

    def forward(endpoint: Endpoint) -> None:
        message(endpoint)
        endpoint.send(1, Message(2, (), ()))

    def receive(endpoint: Endpoint) -> int:
        channels = [message(endpoint).channel for _ in range(41)]
        return channels.count(0)

    assert run([send, receive, forward])[1] == 40


def test_a_grant_names_its_worker_and_channel(run: Run) -> None:
    def give(endpoint: Endpoint) -> None:
        for channel in (5, 5, 2**31 - 1):
            endpoint.grant(0, channel)

    def take(endpoint: Endpoint) -> list[list[int]]:
        got = [endpoint.receive(WAIT_S) for _ in range(6)]
        assert all(isinstance(one, Granted) for one in got)
        return sorted([one.source, one.channel] for one in got if isinstance(one, Granted))

    expected = [[1, 5], [1, 5], [1, 2**31 - 1], [2, 5], [2, 5], [2, 2**31 - 1]]
    assert run([take, give, give])[0] == expected


def test_a_credit_wakes_the_one_that_waits_for_it(run: Run) -> None:
    def give(endpoint: Endpoint) -> None:
        time.sleep(0.2)
        endpoint.grant(0, 3)
        message(endpoint)

    def take(endpoint: Endpoint) -> None:
        assert endpoint.receive(WAIT_S) == Granted(1, 3)
        endpoint.send(1, Message(0, (), ()))

    run([take, give])


def test_a_credit_that_nobody_was_woken_for_is_not_lost(run: Run) -> None:
    def give(endpoint: Endpoint) -> None:
        for channel in range(20):
            endpoint.grant(0, channel)
            endpoint.send(0, Message(channel, (), ()))
        message(endpoint)

    def take(endpoint: Endpoint) -> list[int]:
        got: list[Delivery] = []
        while len(got) < 40:
            messages = sum(isinstance(one, Arrived) for one in got)
            got.append(endpoint.receive(WAIT_S, credits=messages == 20 or len(got) % 3 == 0))
        endpoint.send(1, Message(0, (), ()))
        assert sorted(one.message.channel for one in got if isinstance(one, Arrived)) == list(range(20))
        return sorted(one.channel for one in got if isinstance(one, Granted))

    assert run([take, give])[0] == list(range(20))


def test_credits_are_taken_together_once_each_and_before_those_that_receive_gives(run: Run) -> None:
    def give(endpoint: Endpoint) -> None:
        for channel in (3, 4, 3):
            endpoint.grant(0, channel)
        endpoint.send(0, Message(0, (), ()))
        message(endpoint)
        endpoint.grant(0, 5)

    def take(endpoint: Endpoint) -> list[int]:
        first = [endpoint.receive(WAIT_S, credits=False)]
        while not isinstance(first[-1], Arrived):  # a credit that nobody has asked for
            first.append(endpoint.receive(WAIT_S, credits=False))
        got = [one.channel for one in first if isinstance(one, Granted)] + [
            credit.channel for credit in endpoint.credits()
        ]
        while len(got) < 3:  # a credit may be late
            one = endpoint.receive(WAIT_S)
            assert isinstance(one, Granted)
            got.append(one.channel)
        assert not endpoint.credits()
        endpoint.send(1, Message(0, (), ()))
        assert endpoint.receive(WAIT_S) == Granted(1, 5)
        return sorted(got)

    assert run([take, give])[0] == [3, 3, 4]


def test_nothing_follows_from_a_worker_that_is_lost(run: Run) -> None:
    def give(endpoint: Endpoint) -> None:
        for channel in range(20):
            endpoint.grant(0, channel)
        endpoint.abort("enough")

    def take(endpoint: Endpoint) -> None:
        while not isinstance(endpoint.receive(WAIT_S, credits=False), Lost):
            pass
        with pytest.raises(DeadlineError):
            endpoint.receive(0.05)

    run([take, give])


def test_waiting_in_vain_ends_at_its_deadline(run: Run) -> None:
    def wait(endpoint: Endpoint) -> str:
        with pytest.raises(DeadlineError):
            endpoint.receive(0.0)
        with pytest.raises(DeadlineError) as caught:
            endpoint.receive(0.05)
        return str(caught.value)

    assert all("0.05 s" in text for text in run([wait, wait]))


def test_both_sides_count_the_same_bytes_per_channel(run: Run) -> None:
    def send(endpoint: Endpoint) -> list[dict[int, int]]:
        endpoint.send(1, Message(0, (1,), (torch.ones(3), 1, 2.0, None)))
        endpoint.send(1, Message(0, (2,), (torch.ones((), dtype=torch.float64), torch.empty(0, 4))))
        endpoint.send(1, Message(4, (), (torch.ones(100_000, dtype=torch.bool), torch.ones(2, dtype=torch.bfloat16))))
        endpoint.grant(1, 9)
        return [endpoint.bytes_sent, endpoint.bytes_received]

    def receive(endpoint: Endpoint) -> list[dict[int, int]]:
        for _ in range(4):
            endpoint.receive(WAIT_S)
        return [endpoint.bytes_sent, endpoint.bytes_received]

    def keyed(counts: dict[Any, int]) -> dict[int, int]:
        return {int(channel): count for channel, count in counts.items()}

    (sent, nothing), (nothing_too, received) = run([send, receive])
    assert keyed(sent) == keyed(received) == {0: 20, 4: 100_004}
    assert nothing == nothing_too == {}


def test_bytes_count_as_received_when_receive_returns_them(run: Run) -> None:
    def receive(endpoint: Endpoint) -> None:
        for i in range(1, 6):
            message(endpoint)
            assert endpoint.bytes_received == {3: 40 * i}

    def send(endpoint: Endpoint) -> None:
        for _ in range(5):
            endpoint.send(1, Message(3, (), (torch.ones(10),)))

    run([send, receive])


def test_a_worker_that_dies_is_lost_to_every_other_exactly_once(run: Run, kind: str) -> None:
    def survive(endpoint: Endpoint) -> list[int]:
        other = 2 - endpoint.worker
        endpoint.send(1, Message(0, (), (0,) if endpoint.worker == 0 else (2,)))
        endpoint.send(other, Message(1, (), ()))
        got = [endpoint.receive(WAIT_S), endpoint.receive(WAIT_S)]
        lost = [one for one in got if isinstance(one, Lost)]
        assert [one.message.channel for one in got if isinstance(one, Arrived)] == [1]
        assert lost[0].reason
        endpoint.send(1, Message(0, (), (torch.ones(100_000),)))
        endpoint.grant(1, 0)
        with pytest.raises(DeadlineError):
            endpoint.receive(0.02)
        return [one.source for one in lost]

    def perish(endpoint: Endpoint) -> None:
        got = {message(endpoint).values, message(endpoint).values}
        assert got == {(0,), (2,)}
        die(kind)

    assert run([survive, perish, survive]) == [[1], DIED, [1]]


def test_an_abort_tells_its_reason_to_all_others(run: Run) -> None:
    def stop(endpoint: Endpoint) -> None:
        endpoint.send(0, Message(0, (), (torch.ones(100_000),)))
        endpoint.abort("the loss is no number: ∞")
        with pytest.raises(WorkerLostError):
            endpoint.send(0, Message(0, (), ()))
        with pytest.raises(WorkerLostError):
            endpoint.grant(2, 0)
        endpoint.abort("again")

    def first(endpoint: Endpoint) -> str:
        assert message(endpoint).payload_bytes == 400_000
        return lost(endpoint)

    def lost(endpoint: Endpoint) -> str:
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Lost)
        assert delivery.source == 1
        with pytest.raises(DeadlineError):
            endpoint.receive(0.02)
        return delivery.reason

    assert run([first, stop, lost]) == ["the loss is no number: ∞", None, "the loss is no number: ∞"]


def test_all_may_abort_at_once(run: Run) -> None:
    def stop(endpoint: Endpoint) -> None:
        endpoint.send((endpoint.worker + 1) % 3, Message(0, (), (torch.ones(2**20),)))
        endpoint.abort("each for itself")

    run([stop] * 3)


def test_closing_flushes_and_is_no_loss_to_those_who_go_on(run: Run) -> None:
    def early(endpoint: Endpoint) -> None:
        for i in range(30):
            endpoint.send(1, Message(0, (i,), (torch.full((2**16,), i),)))
        endpoint.close()
        endpoint.close()
        with pytest.raises(InternalError):
            endpoint.send(1, Message(0, (), ()))

    def late(endpoint: Endpoint) -> list[int]:
        got = [message(endpoint) for _ in range(30)]
        for other in (0, 2):
            endpoint.send(other, Message(0, (), (torch.ones(100_000),)))
            endpoint.grant(other, 0)
        assert message(endpoint).channel == 1
        endpoint.send(0, Message(0, (), ()))
        with pytest.raises(DeadlineError):
            endpoint.receive(0.05)
        return [one.header[0] for one in got]

    def other(endpoint: Endpoint) -> None:
        assert message(endpoint).payload_bytes == 400_000
        assert isinstance(endpoint.receive(WAIT_S), Granted)
        endpoint.send(1, Message(1, (), ()))

    assert run([early, late, other])[1] == list(range(30))


def test_two_that_close_while_both_are_sending_lose_nothing_that_was_asked_for(run: Run) -> None:
    def swap(endpoint: Endpoint) -> None:
        other = 1 - endpoint.worker
        for i in range(10):
            endpoint.send(other, Message(0, (i,), (torch.ones(2**18),)))
        assert [message(endpoint).header[0] for i in range(5)] == list(range(5))

    run([swap, swap])


def test_a_worker_alone_waits_and_closes(run: Run) -> None:
    def alone(endpoint: Endpoint) -> None:
        with pytest.raises(DeadlineError):
            endpoint.receive(0.01)

    run([alone])


BAD_MESSAGES = {
    "channel": Message(-1, (), ()),
    "header": Message(0, (0,) * 17, ()),
    "header number": Message(0, (2**63,), ()),
    "int": Message(0, (), (2**63,)),
    "bool": Message(0, (), (True,)),
    "text": Message(0, (), ("x",)),  # type: ignore[arg-type]
    "graph": Message(0, (), (torch.ones(2, requires_grad=True),)),
    "strides": Message(0, (), (torch.ones(2, 3).t(),)),
    "conjugate": Message(0, (), (torch.ones(2, dtype=torch.complex64).conj(),)),
    "device": Message(0, (), (torch.ones(2, device="meta"),)),
    "sparse": Message(0, (), (torch.ones(2).to_sparse(),)),
}


FAULTS = [("memory", fault) for fault in BAD_MESSAGES] + [(kind, "strides") for kind in KINDS if kind != "memory"]


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_what_breaks_the_contract_is_refused_before_it_leaves(kind: str, fault: str, tmp_path: Path) -> None:
    def send(endpoint: Endpoint) -> None:
        with pytest.raises(InternalError):
            endpoint.send(1, BAD_MESSAGES[fault])
        for to in (endpoint.worker, 2, -1):
            with pytest.raises(InternalError):
                endpoint.send(to, Message(0, (), ()))
        with pytest.raises(InternalError):
            endpoint.grant(1, -1)
        assert endpoint.bytes_sent == {}

    def receive(endpoint: Endpoint) -> None:
        with pytest.raises(DeadlineError):
            endpoint.receive(0.01)

    run_workers(kind, [send, receive], tmp_path)


def send_until_refused(endpoint: Endpoint) -> None:
    while True:
        endpoint.send(1, Message(0, (), (1,)))


def test_an_abort_from_another_thread_ends_the_sending(run: Run) -> None:
    def work(endpoint: Endpoint) -> None:
        helper = threading.Thread(target=endpoint.abort, args=("stop",))
        helper.start()
        with pytest.raises(WorkerLostError):
            send_until_refused(endpoint)
        helper.join(WAIT_S)

    def other(endpoint: Endpoint) -> str:
        delivery: Delivery = endpoint.receive(WAIT_S)
        while isinstance(delivery, Arrived):
            delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Lost)
        return delivery.reason

    assert run([work, other])[1] == "stop"


def test_an_abort_from_another_thread_ends_the_waiting(run: Run) -> None:
    """It is told as the loss of this worker, at once and not when the others have been."""

    def wait(endpoint: Endpoint) -> None:
        ender = threading.Timer(0.2, endpoint.abort, ("enough",))
        ender.start()
        start = time.monotonic()
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Lost)
        assert delivery.source == endpoint.worker
        assert endpoint.aborted
        assert time.monotonic() - start < WAIT_S / 2
        ender.join()

    def other(endpoint: Endpoint) -> None:
        assert isinstance(endpoint.receive(WAIT_S), Lost)

    run([wait, other])
