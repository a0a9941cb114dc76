"""The stand-in itself: what a GPU refuses it refuses, and what torch asks of one it answers."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

device = sys.modules.get("tests.standin.device")
if device is None:
    pytest.skip("these devices are real", allow_module_level=True)


@pytest.fixture(autouse=True)
def no_races() -> None:
    """Here there are to be some."""


GPU = torch.device("cuda", 0)
OTHER = torch.device("cuda", torch.cuda.device_count() - 1)
MIB = 1 << 20


def on(place: torch.device | str, *sizes: int) -> torch.Tensor:
    return torch.ones(sizes, device=place)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, y: x + y,
        lambda x, y: x @ y.T,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.lerp_(y, 0.5),
        lambda x, y: torch._foreach_add_([x], [y]),
        lambda x, y: functional.linear(x, y),
    ],
)
@pytest.mark.parametrize("place", ["cpu", OTHER])
def test_tensors_of_two_devices_do_not_meet(operation: Callable[..., Any], place: torch.device | str) -> None:
    for pair in ((on(GPU, 2, 3), on(place, 2, 3)), (on(place, 2, 3), on(GPU, 2, 3))):
        with pytest.raises(RuntimeError, match="two devices"):
            operation(*pair)


def test_a_number_on_the_cpu_meets_a_tensor_where_cuda_lets_it() -> None:
    number = torch.tensor(2.0)
    assert torch.equal((on(GPU, 3) * number).cpu(), torch.full((3,), 2.0))
    for refused in (partial(number.add_, on(GPU)), partial(torch.stack, [number, on(GPU)])):
        with pytest.raises(RuntimeError, match="two devices"):
            refused()


def test_indices_may_lie_on_the_cpu_labels_may_not() -> None:
    rows = on(GPU, 4, 2)
    assert rows[torch.tensor([0, 2])].device == GPU
    with pytest.raises(RuntimeError, match="two devices"):
        functional.cross_entropy(rows, torch.tensor([0, 1, 0, 1]))


def test_a_view_shares_memory_and_autograd_passes_it() -> None:
    x = on(GPU, 4, 3).requires_grad_()
    (x.t()[1:].reshape(-1) * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 2, 2]] * 4
    y = on(GPU, 6)
    y.view(2, 3)[1].zero_()
    assert y.tolist() == [1, 1, 1, 0, 0, 0]


def test_attention_lies_in_memory_otherwise_than_on_the_cpu() -> None:
    q = torch.randn(2, 5, 3, 4).transpose(1, 2)
    there, here = (functional.scaled_dot_product_attention(x, x, x) for x in (q.to(GPU), q))
    assert torch.allclose(there.cpu(), here, atol=1e-6)
    assert there.stride() != here.stride()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_compute_what_they_do_on_the_cpu(kind: type[nn.LSTM]) -> None:
    layer, x = kind(5, 4, num_layers=2, bidirectional=True, batch_first=True), torch.randn(3, 6, 5)
    moved = copy.deepcopy(layer).to(GPU)
    results = []
    for own, place in ((layer, "cpu"), (moved, GPU)):
        out, _ = own(x.to(place))
        out.square().sum().backward()
        results.append([out.cpu(), *(p.grad.cpu() for p in own.parameters() if p.grad is not None)])
    assert len(results[0]) == 17
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


def test_each_device_draws_numbers_of_its_own() -> None:
    torch.manual_seed(5)
    host, one = torch.rand(4), torch.rand(4, device=GPU)
    assert not torch.equal(host, one.cpu())
    torch.cuda.manual_seed_all(5)
    assert torch.equal(one, torch.rand(4, device=GPU))
    state = torch.cuda.get_rng_state(GPU)
    masks = []
    for _ in range(2):
        torch.cuda.set_rng_state(state, GPU)
        masks.append(functional.dropout(on(GPU, 8, 8), 0.5))
    assert torch.equal(*masks)
    assert set(masks[0].unique().tolist()) == {0.0, 2.0}


def test_memory_is_counted_and_refused() -> None:
    before = torch.cuda.memory_allocated(OTHER)
    torch.cuda.reset_peak_memory_stats(OTHER)
    x = torch.zeros(MIB, device=OTHER)  # of 4 bytes each
    assert torch.cuda.memory_allocated(OTHER) - before == 4 * MIB
    y = x + x
    del y
    assert torch.cuda.memory_allocated(OTHER) - before == 4 * MIB
    assert torch.cuda.max_memory_allocated(OTHER) - before >= 8 * MIB
    assert torch.cuda.memory_reserved(OTHER) >= torch.cuda.memory_allocated(OTHER)
    assert torch.cuda.memory_stats(OTHER)["allocated_bytes.all.current"] - before == 4 * MIB
    free, total = torch.cuda.mem_get_info(OTHER)
    assert total == torch.cuda.get_device_properties(OTHER).total_memory
    assert total - free == torch.cuda.memory_allocated(OTHER)
    torch.cuda.set_per_process_memory_fraction((before + 10 * MIB) / total, OTHER)
    try:
        words = r"CUDA out of memory. Tried to allocate 8.00 MiB. GPU \d has a total capacity"
        with pytest.raises(torch.OutOfMemoryError, match=words):
            torch.cat([x, x])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, OTHER)
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated(OTHER) == before


def test_reads_by_the_host_are_counted_by_thread() -> None:
    assert device is not None
    x = on(GPU, 3)
    pinned = torch.zeros(3).pin_memory()
    assert pinned.is_pinned()
    assert not torch.zeros(3).is_pinned()

    def read() -> None:
        x.sum().item()
        x.cpu()
        x[x > 0]
        pinned.copy_(x, non_blocking=True)
        (x * 2).add_(1)

    before = device.host_reads()
    read()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    after = device.host_reads()
    assert after[threading.get_ident()] - before.get(threading.get_ident(), 0) == 3
    assert sum(after.values()) - sum(before.values()) == 6
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            x.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_busy_stream_holds_up_whoever_waits_for_it() -> None:
    busy, idle = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    event, other = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(100_000_000)
    event.record(busy)
    other.record(idle)
    assert other.query()
    assert not event.query()
    idle.wait_event(event)
    other.record(idle)
    assert not other.query()
    other.synchronize()
    assert time.perf_counter() - began >= 0.05
    assert event.elapsed_time(other) >= 0


def test_work_on_two_streams_without_a_wait_is_found() -> None:
    assert device is not None
    before = len(device.races())
    one, two = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    with torch.cuda.stream(one):
        x = on(GPU, 3) * 2
    two.wait_stream(one)
    with torch.cuda.stream(two):
        y = x.t() + 1
    assert device.races(before) == []
    with torch.cuda.stream(one):
        x.view(3).add_(y)
    found = [text.partition(" on stream")[0] for text in device.races(before)]
    assert found == ["aten::add"] * 2  # it writes what the other reads, and reads what that has written
    two.synchronize()
    with torch.cuda.stream(one):
        y.add_(1)
    x + 1
    assert len(device.races(before)) == 3  # the default stream has not waited


def test_two_fused_steps_may_read_one_gradient_which_only_unscaling_writes() -> None:
    assert device is not None
    before = len(device.races())
    gradient = torch.ones(3, device=GPU)
    for stream in (torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)):
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            weight = torch.nn.Parameter(torch.ones(3, device=GPU))
            weight.grad = gradient
            torch.optim.SGD([weight], lr=0.1, fused=True).step()
    assert device.races(before) == []
    torch._fused_sgd_(
        [torch.ones(3, device=GPU)],
        [gradient],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
        grad_scale=torch.ones(1, device=GPU),
    )
    found = [text.partition(" on stream")[0] for text in device.races(before)]
    assert set(found) == {"aten::_fused_sgd_"}


FAILING = """
import torch
from torch.nn import functional
rows = torch.zeros(2, 3, device="cuda")
for name, call in (("label", lambda: functional.cross_entropy(rows, torch.tensor([0, 7], device="cuda"))),
                   ("later", lambda: torch.ones(2, device="cuda")), ("wait", torch.cuda.synchronize)):
    try:
        call()
    except torch.AcceleratorError as error:
        print(name, str(error).splitlines()[0])
"""


def test_a_wrong_label_breaks_the_device_for_good() -> None:
    """In a process of its own, which it breaks."""
    command = [sys.executable, "-c", f"import tests.standin.device\n{FAILING}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = "CUDA error: device-side assert triggered"
    assert done.stdout.splitlines() == [f"{name} {told}" for name in ("label", "later", "wait")]
