"""Checks of global tensors that run on four processes; each writes what it found, by name, as JSON.

torchrun --nproc-per-node 4 -m tests.global_tensor.program FOLDER
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import roundelay
from roundelay import GlobalTensor, sbp
from roundelay.errors import UsageError
from roundelay.global_tensor import from_dtensor, operators, to_dtensor
from roundelay.ir.sbp import P_MAX, B, P, Signature

Check = Callable[[], None]

SIGNATURES: tuple[Signature, ...] = (B, P, sbp.split(0), sbp.split(1))
ROWS, COLUMNS = 5, 7  # not divisible by 2 or 3


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


ONE: dict[str, Callable[..., Any]] = {
    "neg": torch.neg,
    "relu": torch.relu,
    "exp": torch.exp,
    "gelu": F.gelu,
    "sum": torch.sum,
    "sum of rows": lambda x: x.sum(1),
    "mean": torch.mean,
    "mean of columns": lambda x: x.mean(0, keepdim=True),
    "amax": lambda x: x.amax(1),
    "softmax": lambda x: x.softmax(-1),
    "transpose": lambda x: x.t(),
    "view": lambda x: x.reshape(-1),
    "view of a transposed": lambda x: x.t().reshape(-1),
    "strides": lambda x: (
        x.t().as_strided((3, 2), (5, 2)) if isinstance(x, GlobalTensor) else x.t().contiguous()[:3, ::2][:, :2]
    ),
    "slice": lambda x: x[:, 1:],
    "times a number": lambda x: 2 * x,
    "plus a number": lambda x: x + 1,
    "times a tensor without dimensions": lambda x: x * torch.tensor(2.0, dtype=x.dtype),
    "over zero": lambda x: torch.stack([1 / x.abs().copysign(zero) for zero in (0.0, -0.0)]),
    "layer norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "split": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "topk": lambda x: x.topk(2).values,
}
TWO: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y.t(),
    "mul": lambda x, y: x * y.t(),
    "sub": lambda x, y: x - y.t(),
    "matmul": torch.matmul,
    "linear": lambda x, y: F.linear(x, y.t()),
    "twice the same": lambda x, y: (x * x) @ y,
    "chain": lambda x, y: torch.relu(x @ y) @ y.t(),
}


def on(*ranks: int) -> roundelay.Placement:
    return roundelay.placement(ranks)


def same(found: GlobalTensor, expected: Tensor) -> None:
    whole = found.full()
    assert tuple(found.shape) == tuple(expected.shape), (found.shape, expected.shape)
    if found.placement.position is None:
        assert whole.numel() == 0
    else:
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def of_one(function: Callable[..., Any]) -> None:
    for own, place in product(SIGNATURES, (on(0, 1), on(1, 2, 3))):
        x = r(ROWS, COLUMNS)
        same(function(roundelay.tensor(x, placement=place, sbp=own)), function(x))


def of_two(function: Callable[..., Any]) -> None:
    for own, other in product(SIGNATURES, SIGNATURES):
        x, y, place = r(ROWS, COLUMNS), r(COLUMNS, ROWS), on(3, 0, 2)
        found = function(*(roundelay.tensor(v, placement=place, sbp=s) for v, s in ((x, own), (y, other))))
        same(found, function(x, y))


def partial_sums_are_kept() -> None:
    u, v, w = r(4, 6), r(6, 4), r(4, 3)
    place = on(0, 1)
    product_of_two = roundelay.tensor(u, placement=place, sbp=sbp.split(1)) @ roundelay.tensor(
        v, placement=place, sbp=sbp.split(0)
    )
    assert product_of_two.sbp == P
    of_three = product_of_two @ roundelay.tensor(w, placement=place)
    assert of_three.sbp == P, "no boxing between the products"
    same(of_three, u @ v @ w)


def table_4() -> None:
    """The paper's program, with the signatures that it says are inferred."""
    first, second = on(0, 1), on(2, 3)
    a, b, c = r(4, 5), r(5, 8), r(8, 6)
    y = torch.matmul(roundelay.tensor(a, placement=first, sbp=sbp.split(0)), roundelay.tensor(b, placement=first))
    assert y.sbp == sbp.split(0)
    y = y.to_global(placement=second, sbp=sbp.broadcast)
    z = torch.matmul(y, roundelay.tensor(c, placement=second, sbp=sbp.split(1)))
    assert z.sbp == sbp.split(1)
    assert z.to_local().shape == ((4, 3) if dist.get_rank() in (2, 3) else (0,))
    same(z, a @ b @ c)


def every_change() -> None:
    places = [on(0), on(0, 1), on(2, 3), on(1, 2, 3), on(3, 1)]
    for own, wanted in product(SIGNATURES, SIGNATURES):
        for source, target in product(places, places):
            x = r(ROWS, COLUMNS)
            moved = roundelay.tensor(x, placement=source, sbp=own).to_global(placement=target, sbp=wanted)
            assert (moved.placement, moved.sbp) == (target, wanted)
            same(moved, x)
    x = torch.arange(12).view(6, 2) % 2 == 0
    same(roundelay.tensor(x, placement=places[0]).to_global(placement=places[3], sbp=sbp.split(0)).float(), x.float())


def sums_are_in_the_order_of_the_processes() -> None:
    place, addends = on(2, 0, 3), [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    position = place.position
    own = addends[position] if position is not None else torch.empty(0)
    x = roundelay.from_local(own, (1,), placement=place, sbp=P)
    for found in (x.full(), x.to_global(placement=on(1)).full()):
        if found.numel():
            assert torch.equal(found, addends[0] + addends[1] + addends[2])


def random_numbers_do_not_depend_on_the_placement() -> None:
    wholes = []
    for place, own in ((on(0, 1), sbp.split(0)), (on(0, 1, 2, 3), sbp.split(1)), (on(1, 3), P)):
        torch.manual_seed(7)
        drawn = roundelay.randn(4, 6, placement=place, sbp=own, dtype=torch.float64)
        wholes.append(drawn.to_global(placement=on(0), sbp=B))
    torch.manual_seed(7)
    expected = torch.randn(4, 6, dtype=torch.float64)
    for found in wholes:
        same(found, expected)
    same(roundelay.ones(2, 3, placement=on(1)) + roundelay.zeros(2, 3, placement=on(1), sbp=P), torch.ones(2, 3))
    assert float(roundelay.rand(3, placement=on(0, 1, 2, 3)).full().max()) < 1.0


def gradients_are_those_of_the_whole() -> None:
    for own, other, place in product(SIGNATURES, SIGNATURES, (on(0, 1, 2), on(2, 3))):
        x, w = r(ROWS, COLUMNS), r(COLUMNS, 4)
        whole = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        (torch.relu((whole[0] * whole[0]) @ whole[1]) ** 2).sum().backward()
        a = roundelay.tensor(x, placement=on(0, 1, 2), sbp=own).requires_grad_()
        b = roundelay.tensor(w, placement=place, sbp=other).requires_grad_()
        (torch.relu((a * a).to_global(placement=place, sbp=sbp.broadcast) @ b) ** 2).sum().backward()
        for leaf, expected in zip((a, b), whole, strict=True):
            assert isinstance(leaf.grad, GlobalTensor)
            assert expected.grad is not None
            same(leaf.grad, expected.grad)


def gradients_of_operators() -> None:
    for function in (
        lambda x: torch.where(x > 0, x, x * 2),
        lambda x: F.layer_norm(x, (COLUMNS,)),
        lambda x: x.softmax(1) * x,
    ):
        for own in SIGNATURES:
            x = r(ROWS, COLUMNS)
            whole = x.clone().requires_grad_()
            (function(whole) ** 2).sum().backward()
            ours = roundelay.tensor(x, placement=on(0, 1, 2), sbp=own).requires_grad_()
            (function(ours) ** 2).sum().backward()
            assert isinstance(ours.grad, GlobalTensor)
            assert whole.grad is not None
            same(ours.grad, whole.grad)


def gradients_of_few() -> None:
    """Results that are not asked for, gradients that are added up, and zeros that autograd makes."""
    x, w, place = r(ROWS, COLUMNS), r(COLUMNS), on(0, 1, 2)
    functions: tuple[Callable[..., Tensor], ...] = (
        lambda x, w: F.layer_norm(x, (COLUMNS,), w, w),
        lambda x, w: F.conv1d(x.unsqueeze(1), w[:3].view(1, 1, 3)),
        lambda x, w: x * w.split([2, 5])[1].sum(),
    )
    for function, own in product(functions, SIGNATURES):
        whole = w.clone().requires_grad_()
        leaf = roundelay.tensor(w, placement=place).requires_grad_()
        for _ in range(2):
            (function(x, whole) ** 2).sum().backward()
            (function(roundelay.tensor(x, placement=place, sbp=own), leaf) ** 2).sum().backward()
        assert isinstance(leaf.grad, GlobalTensor)
        assert whole.grad is not None
        same(leaf.grad, whole.grad)
    assert roundelay.ones(2, placement=place, requires_grad=True).requires_grad


def fewer_rows_than_processes() -> None:
    x, place = r(2, 1), on(0, 1, 2)
    functions: tuple[Callable[[Tensor], Tensor], ...] = (
        torch.relu, lambda x: x.sum(1), lambda x: x.softmax(0), lambda x: x @ x.t(), lambda x: x.t().reshape(-1),
    )  # fmt: skip
    for own, wanted in product(SIGNATURES, SIGNATURES):
        one = roundelay.tensor(x, placement=place, sbp=own)
        for target in (place, on(1, 3)):
            same(one.to_global(placement=target, sbp=wanted), x)
        for function in functions:
            found = function(one)
            assert isinstance(found, GlobalTensor)
            same(found, function(x))


def numbers_among_the_arguments() -> None:
    """Numbers that are equal and not the same, and a tensor of no dimensions that changes afterwards."""
    x = roundelay.tensor(torch.ones(3), placement=on(0, 1))
    for number in (0.0, -0.0):
        same(x / number, torch.ones(3) / number)
    two = torch.tensor(2.5)
    same(x * two, torch.full((3,), 2.5))
    two.fill_(9.0)
    same(x * torch.tensor(2.5), torch.full((3,), 2.5))
    for i in range(operators._MOST + 1):
        operators._kept(operators._COMPILED, ("a number", i), lambda: None)
    assert len(operators._COMPILED) <= operators._MOST
    operators._COMPILED.clear()


def memory_is_not_the_callers() -> None:
    x = r(4, 3)
    before, one = x.clone(), [roundelay.tensor(x, placement=on(0, 1), sbp=own) for own in SIGNATURES]
    x.zero_()
    for made in one:
        same(made, before)


def attention_without_dropout() -> None:
    q = r(2, 3, 4, 4)
    one = roundelay.tensor(q, placement=on(0, 1, 2), sbp=sbp.split(1)).requires_grad_()
    whole = q.clone().requires_grad_()
    found, expected = (F.scaled_dot_product_attention(x, x, x) for x in (one, whole))
    found.sum().backward()
    expected.sum().backward()
    assert isinstance(found, GlobalTensor)
    same(found, expected)
    assert isinstance(one.grad, GlobalTensor)
    assert whole.grad is not None
    same(one.grad, whole.grad)


def places_of_nothing() -> None:
    """One process has none of two columns."""
    x, index, place = r(4, 2), torch.tensor([[1], [0], [1], [1]]), on(0, 1, 2)
    ours = roundelay.tensor(x, placement=place, sbp=sbp.split(1))
    same(ours.gather(1, roundelay.tensor(index, placement=place)), x.gather(1, index))
    same(ours[:, roundelay.tensor(index[:, 0], placement=place)], x[:, index[:, 0]])
    same(ours.amax(1), x.amax(1))


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        call()
    assert words in str(error.value), str(error.value)


def refusals() -> None:
    x = roundelay.tensor(r(4, 4), placement=on(0, 1), sbp=sbp.split(0))
    far = roundelay.tensor(r(4, 4), placement=on(2, 3))
    for call, words in (
        (lambda: x + far, "aten.add.Tensor on global tensors (4, 4) S(0), (4, 4) B: got tensors on ranks 0, 1 and"),
        (lambda: x + r(4, 4), "a tensor that is not global"),
        (lambda: x.add_(1), "an operator that writes into a tensor"),
        (lambda: F.dropout(x, 0.5), "draws random numbers"),
        (lambda: x @ roundelay.tensor(r(3, 3), placement=on(0, 1)), "aten.mm.default on global tensors"),
        (lambda: x.nonzero(), "aten.nonzero.default"),
        (lambda: x.sum().item(), "aten._local_scalar_dense"),
        (lambda: x.to_global(sbp=sbp.split(2)), "a split of one of its dimensions"),
        (lambda: roundelay.randn(3, placement=on(0), sbp=sbp.split(1)), "a split of one of its dimensions"),
        (lambda: x.to_global(sbp=sbp.split(-1)), "a split of one of its dimensions"),
        (lambda: x.to_global(sbp="S(0)"), "a split of one of its dimensions"),  # type: ignore[arg-type]
        (lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "draws random numbers"),
        (lambda: F.batch_norm(x, x[0], x[1], training=True), "an operator that writes into a tensor"),
        (lambda: roundelay.ones(3, placement=on(0), sbp=P_MAX), "got P(max)"),
        (lambda: on(0, 0), "different ones from 0 to 3"),
        (lambda: on(4), "different ones from 0 to 3"),
    ):
        refused(call, words)


def parts_of_other_shapes_are_refused() -> None:
    place = on(0, 1, 2, 3)
    refused(
        lambda: roundelay.from_local(r(3, 7), (4, 2), placement=place, sbp=sbp.split(0)), "expected (1, 2): its part"
    )


def dtensors_both_ways() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    x, w, all_four = r(8, 6), r(6, 4), on(0, 1, 2, 3)
    for own in (B, P, sbp.split(0)):
        theirs = to_dtensor(roundelay.tensor(x, placement=all_four, sbp=own))
        assert isinstance(theirs, DTensor)
        torch.testing.assert_close(theirs.full_tensor(), x)
        back = from_dtensor(theirs)
        assert back.sbp == own
        same(back @ roundelay.tensor(w, placement=all_four), x @ w)
    mesh = init_device_mesh("cpu", (4,))
    same(from_dtensor(distribute_tensor(x, mesh, [Shard(0)])), x)
    same(from_dtensor(distribute_tensor(x, mesh, [Replicate()])), x)
    for call in (
        lambda: to_dtensor(roundelay.tensor(x, placement=all_four, sbp=sbp.split(1))),  # 2, 2, 1, 1; 2, 2, 2
        lambda: from_dtensor(distribute_tensor(x, mesh, [Shard(1)])),
    ):
        refused(call, "[2, 2, 1, 1] here, and of [2, 2, 2] in DTensor")


def gradients_through_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, all_four = init_device_mesh("cpu", (4,)), on(0, 1, 2, 3)
    x = r(8, 6)
    y = r(8, 6)
    for theirs in (Shard(0), Replicate()):
        for own in (B, P, sbp.split(0)):
            w = distribute_tensor(x, mesh, [theirs]).requires_grad_()
            v = roundelay.tensor(y, placement=all_four, sbp=own).requires_grad_()
            ((from_dtensor(w) * v) ** 2).sum().backward()
            assert w.grad is not None
            assert v.grad is not None
            torch.testing.assert_close(w.grad.full_tensor(), 2 * x * y**2)
            same(v.grad, 2 * x**2 * y)
            other = roundelay.tensor(y, placement=all_four, sbp=own).requires_grad_()
            (to_dtensor(other) * distribute_tensor(x, mesh, [theirs])).sum().full_tensor().backward()
            assert other.grad is not None
            same(other.grad, x)


def gradients_through_another_dtype() -> None:
    x = r(ROWS, COLUMNS)
    for own in SIGNATURES:
        v = roundelay.tensor(x, placement=on(0, 1, 2, 3), sbp=own).requires_grad_()
        (v.to(torch.float32) * 2).sum().backward()
        assert v.grad is not None
        same(v.grad, torch.full_like(x, 2))


def attention_with_a_mask_and_a_scale() -> None:
    q, mask = r(2, 4, 5, 8), r(5, 5)
    own = roundelay.tensor(q, placement=on(0, 1, 2, 3), sbp=sbp.split(1))
    given = roundelay.tensor(mask, placement=on(0, 1, 2, 3))
    same(
        F.scaled_dot_product_attention(own, own, own, attn_mask=given, scale=0.3),
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3),
    )


def numbers_that_are_read_are_refused_by_name() -> None:
    x = roundelay.tensor(r(4, 4), placement=on(0, 1), sbp=sbp.split(0))
    indices = roundelay.tensor(torch.tensor([1, 2]), placement=on(0, 1))
    refused(lambda: torch.tensor_split(x, indices), "tensor_split on global tensors")


def checks() -> Iterator[tuple[str, Check]]:
    for name, function in ONE.items():
        yield name, lambda function=function: of_one(function)  # type: ignore[misc]
    for name, function in TWO.items():
        yield name, lambda function=function: of_two(function)  # type: ignore[misc]
    for check in (
        partial_sums_are_kept, table_4, every_change, sums_are_in_the_order_of_the_processes,
        random_numbers_do_not_depend_on_the_placement, gradients_are_those_of_the_whole,
        gradients_of_operators, gradients_of_few, places_of_nothing,
        fewer_rows_than_processes, numbers_among_the_arguments,
        memory_is_not_the_callers, attention_without_dropout, parts_of_other_shapes_are_refused, refusals,
        dtensors_both_ways, gradients_through_dtensors, gradients_through_another_dtype,
        attention_with_a_mask_and_a_scale, numbers_that_are_read_are_refused_by_name,
    ):  # fmt: skip
        yield check.__name__, check


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    found: dict[str, str] = {}
    for name, check in checks():
        torch.manual_seed(0)
        try:
            check()
            found[name] = ""
        except (Exception, pytest.fail.Exception):  # the second is what pytest.raises raises
            found[name] = traceback.format_exc()
            break  # the others wait for what this process does not send
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    if all(not text for text in found.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
