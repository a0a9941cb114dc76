"""Sums handed on in shared memory: nobody writes what another still reads, and the bits are those of messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from roundelay import Job, plan, verify
from roundelay.errors import InternalError, PlanError
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.verify_schedule import check_run
from roundelay.planner.prove_plan import fired
from roundelay.runtime.collectives import Parts
from roundelay.runtime.links import SumLink
from roundelay.runtime.shm_chained_sums import BLOCKS, SumBlocks, sum_bytes
from roundelay.session.training import Length, Session
from roundelay.simulator import Simulation, simulate
from roundelay.transport.endpoint import Message
from tests.equivalence.cells import OPTIMIZERS, Bench, bench
from tests.lower.plans import OF_WEIGHTS, works
from tests.test_cyclic import form

BATCHES = 14
OF_STAGE = ExchangePlan(**OF_WEIGHTS | {"phases": ()}, dtypes=("float32", "float64"), shapes=((3,), (1,)))


def uneven(plan: Plan, seed: int) -> Simulation:
    """A run in which some workers, some instructions and perhaps the messages are very slow."""
    chance = Random(seed)
    slow = [chance.choice([1, 1, 30]) for _ in range(plan.num_workers)]
    late = replace(plan, latency_s=chance.choice([0.0, 1.0, 20.0]))
    headers = stream([plan.micro_batches] * BATCHES)
    return simulate(
        late, emit(read(late)), headers, vary=lambda w, _, s: s * slow[w] * chance.choice([0.01, 1, 1, 100])
    )


def pending(run: Simulation) -> int:
    """For how many batches back, at most, some holder had its update still to make when a batch's sum was begun."""
    begun: dict[tuple[int, int], float] = {}
    updated: dict[tuple[int, int], float] = {}
    for interval in run.intervals:
        at = interval.stage, interval.batch
        if interval.opcode == "sum":
            begun[at] = min(begun.get(at, interval.start_s), interval.start_s)
        elif interval.opcode == "update":
            updated[at] = max(updated.get(at, 0.0), interval.end_s)
    return max(
        (back for (stage, t), start in begun.items() for back in range(1, t + 1) if updated[stage, t - back] > start),
        default=0,
    )


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("rule", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("layout", ["dp", "mp"])
def test_all_have_updated_from_a_block_before_anyone_writes_it_again(layout: str, rule: str, size: int) -> None:
    for stages in (1, 3):
        assert max(pending(uneven(form(layout, rule, size, stages), seed)) for seed in range(40)) < BLOCKS


def test_a_sum_that_began_with_an_older_update_to_make_is_no_run_of_a_plan() -> None:
    made = form("dp", "cdp-v1", 3)
    executed = fired(simulate(made, emit(read(made)), stream([1] * 5)))
    check_run(read(made), [1] * 5, executed)
    at = next(i for i, one in enumerate(executed[1]) if one.opcode == "sum" and one.g == 3)
    assert executed[1][at].version == 2
    executed[1][at] = replace(executed[1][at], version=1)
    with pytest.raises(PlanError, match=r"sum of the batch of micro-batch 3: got version 1; expected version 2 or"):
        check_run(read(made), [1] * 5, executed)


def test_fewer_blocks_would_be_written_too_early() -> None:
    assert max(pending(uneven(form("dp", "cdp-v1", 5, 1), seed)) for seed in range(40)) == BLOCKS - 1


class Recorder:
    """In place of an endpoint: what it was given to send, and what was counted."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.counted: Counter[str] = Counter()

    def send(self, to: int, message: Message) -> int:
        self.sent.append((to, message))
        return message.payload_bytes

    def count_shared(self, channel: int, sent: int, received: int) -> None:
        self.counted.update(sent=sent, received=received)


def test_what_lies_in_a_block_is_told_and_what_lies_elsewhere_is_sent() -> None:
    channel = next(c for c in channels_of(read(form("dp", "cdp-v1", 2, 1))) if c.kind == "partial")
    memory = torch.zeros(BLOCKS * (64 + 64), dtype=torch.uint8)
    blocks, endpoint, delivered = SumBlocks(memory, OF_STAGE), Recorder(), list[Message]()
    link = SumLink(channel, endpoint, delivered.append, blocks)  # type: ignore[arg-type]
    assert link.give(Message(channel.id, (0, 6), blocks.of_batch(6))) == 3 * 4 + 8
    assert endpoint.sent[0] == (1, Message(channel.id, (0, 6), (6 % BLOCKS,)))
    link.arrived(0, endpoint.sent[0][1])
    assert [tensor.data_ptr() for tensor in delivered[0].values] == [  # type: ignore[union-attr]
        tensor.data_ptr() for tensor in blocks[6 % BLOCKS]
    ]
    elsewhere = Message(channel.id, (0, 7), (torch.ones(3), torch.ones(1, dtype=torch.float64)))
    for message in (elsewhere, elsewhere._replace(values=())):
        link.give(message)
        assert endpoint.sent[-1][1] is message
        link.arrived(0, message)
        assert delivered[-1] is message
    assert endpoint.counted == {"sent": 20, "received": 20}


def test_only_forms_that_sum_over_time_have_such_memory() -> None:
    place = bench("mlp")
    plan = place.in_layout("dp", "cdp-v1", 3, 2)
    assert {own.stage for work in works(plan) for own in work.stages if own.sums >= 0} == {0, 1}
    assert list(sum_bytes(works(plan)).values()) == [
        BLOCKS * sum(-size // 64 * -64 for size in exchange.sizes) for exchange in plan.exchanges
    ]
    assert sum_bytes(works(place.in_layout("single", "cdp-v1", 3, 2))) == {}


@pytest.mark.parametrize("layout", ["dp", "mp"])
def test_the_same_bytes_are_counted_and_the_same_bits_computed_as_with_messages(layout: str) -> None:
    place = bench("mlp")
    shared, sent = (_trained(place, layout, transport) for transport in ("shm", "memory"))
    assert shared == sent


@pytest.mark.parametrize("layout", ["dp", "mp"])
def test_runs_over_shared_memory_use_the_blocks(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    def found(_: SumBlocks, parts: Parts) -> int | None:
        raise InternalError("a sum", got="found", expected="nothing", remedy="None.")

    monkeypatch.setattr(SumBlocks, "find", found)
    with pytest.raises(InternalError, match="a sum: got found"):
        _trained(bench("mlp"), layout, "shm")


class WithNothing(torch.nn.Module):
    """A model whose first flat tensor of gradients is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.nothing.sum().float() + self.layer(x)


def test_a_sum_whose_first_tensor_is_empty_is_found_by_its_last() -> None:
    made = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 4, generator=made), torch.randint(3, (6,), generator=made)) for _ in range(9)]
    torch.manual_seed(0)
    job = Job(
        model=WithNothing(),
        loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    options = {"layout": "dp", "rule": "cdp-v1", "micro_batches": 3, "stages": 1, "transport": "shm", "cuts": "equal"}
    planned = plan(job, **options)
    assert planned.exchanges[0].shapes[0] == (0,)
    found = verify(job, plan=planned)
    assert found.equal, found.difference


def _trained(place: Bench, layout: str, transport: str) -> list[object]:
    place.restore()
    plan = place.in_layout(layout, "cdp-v2", 3, 2, transport)
    done = Session(place.job(OPTIMIZERS["momentum"]), place.captured, plan, 0, Length(steps=9)).run(
        notify=lambda _: None
    )
    bits = {name: tensor.numpy().tobytes() for name, tensor in done.snapshot.parameters.items()}
    return [bits, [(done.workers[w]["bytes_sent"], done.workers[w]["bytes_received"]) for w in sorted(done.workers)]]
