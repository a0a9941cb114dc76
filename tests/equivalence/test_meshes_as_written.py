"""Programs whose operations meet a mesh in unusual ways compute on it what they compute without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import roundelay
from roundelay.ir.given_signatures import GivenSignatures
from roundelay.ir.plan import Plan
from roundelay.ir.sbp import parse
from roundelay.proof import fidelity_on_mesh

Tables = dict[str, str]


class Program(nn.Module):
    """Layers by name, and a forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        """Rows x classes."""
        return self._forward(self, x)


def two_results(net: Any, x: Tensor) -> Tensor:
    a, b = net.first(x).chunk(2, -1)
    out: Tensor = net.head(net.down(F.relu(net.up(a))) + torch.tanh(b))
    return out


def three_results(net: Any, x: Tensor) -> Tensor:
    a, b, c = net.first(x).split([8, 4, 4], -1)
    out: Tensor = net.head(net.down(F.relu(net.up(a))) + torch.cat([b.exp(), c], -1))
    return out


def a_slice_assigned(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    out = torch.zeros_like(h)
    out[:, :4] = h[:, :4]
    out[:, 4:] = torch.tanh(h[:, 4:])
    made: Tensor = net.head(net.down(F.relu(net.up(out))) + out)
    return made


def views_read_after_the_write(net: Any, x: Tensor) -> Tensor:
    h = net.first(x) * 1.0
    row, block = h[:, 0], h[:, 2:6].unsqueeze(1)
    h[:, :3] *= 2
    h[:, 4].fill_(0.5)
    h.transpose(0, 1)[5] = row
    part = net.down(F.relu(net.up(h)))
    out: Tensor = net.head(part + h + row.unsqueeze(1) + block.squeeze(1).sum(1, keepdim=True))
    return out


def a_copy_that_does_not_see_the_write(net: Any, x: Tensor) -> Tensor:
    h = net.first(x) * 1.0
    before = h.t().reshape(-1)
    h[:, :3] = 0.25
    part = net.down(F.relu(net.up(h)))
    out: Tensor = net.head(part + before.reshape(8, -1).t())
    return out


def a_part_of_a_split_value_written(net: Any, x: Tensor) -> Tensor:
    h = F.gelu(net.up(x))
    h[:, :4] = h[:, 4:8] * 2
    out: Tensor = net.head(net.down(h))
    return out


def an_input_in_halves(net: Any, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    out: Tensor = net.head(F.pad(net.small_down(net.small_up(a) * b), (0, 4)))
    return out


def rows_in_front_columns_behind(net: Any, x: Tensor) -> Tensor:
    x = torch.tanh(net.first(x))
    out: Tensor = net.head(x + net.down(torch.relu(net.up(x))))
    return out


def a_buffer_copied_before_it_is_written(net: Any, x: Tensor) -> Tensor:
    before = torch.empty(8)
    before.copy_(net.seen)
    net.seen.add_(1.0)
    out: Tensor = net.head(net.down(F.relu(net.up(net.first(x) - before))))
    return out


def a_copy_of_a_transposed(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    turned = torch.zeros_like(h.t().contiguous())
    turned.copy_(h.t())
    summed = turned.view(-1).view(8, -1).sum(0).unsqueeze(1)
    out: Tensor = net.head(net.down(F.relu(net.up(h))) + summed)
    return out


def a_write_of_a_wider_dtype(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).bfloat16()
    h[:, :3] += torch.arange(3.0) / 7
    h *= torch.ones(8)
    out: Tensor = net.head(net.down(F.relu(net.up(net.low(h).float()))))
    return out


def bfloat16_between_norms(net: Any, x: Tensor) -> Tensor:
    x = x + net.low_down(F.gelu(net.low_up(net.norm(x).bfloat16()))).float()
    out: Tensor = net.head(x)
    return out


def complex_weights(net: Any, x: Tensor) -> Tensor:
    z = net.complex_down(torch.tanh(net.complex_up(x.to(torch.complex64)))).conj()
    out: Tensor = net.head(z.real + z.imag)
    return out


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module], Tables, Tables]] = {
    "two results": (two_results, lambda: nn.Linear(8, 16), {}, {}),
    "three results": (three_results, lambda: nn.Linear(8, 16), {}, {}),
    "a slice assigned": (a_slice_assigned, lambda: nn.Linear(8, 8), {}, {}),
    "views read after the write": (views_read_after_the_write, lambda: nn.Linear(8, 8), {}, {}),
    "a copy that does not see the write": (a_copy_that_does_not_see_the_write, lambda: nn.Linear(8, 8), {}, {}),
    "a part of a split value written": (
        a_part_of_a_split_value_written,
        lambda: nn.Identity(),
        {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
        {},
    ),
    "an input in halves": (
        an_input_in_halves,
        lambda: nn.Identity(),
        {"small_up.weight": "S(0)", "small_up.bias": "S(0)"},
        {},
    ),
    "rows in front, columns behind": (
        rows_in_front_columns_behind,
        lambda: nn.Linear(8, 8),
        {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"},
        {"tanh": "S(0)"},
    ),
    "a buffer copied before it is written": (a_buffer_copied_before_it_is_written, lambda: nn.Linear(8, 8), {}, {}),
    "a copy of a transposed": (a_copy_of_a_transposed, lambda: nn.Linear(8, 8), {}, {}),
    "a write of a wider dtype": (a_write_of_a_wider_dtype, lambda: nn.Linear(8, 8), {}, {}),
    "bfloat16 between norms": (bfloat16_between_norms, lambda: nn.Identity(), {}, {}),
    "complex weights": (complex_weights, lambda: nn.Identity(), {}, {}),
}


def job(name: str) -> roundelay.Job:
    forward, first = CASES[name][:2]
    torch.manual_seed(0)
    own: dict[str, nn.Module] = {"first": first(), "up": nn.Linear(8, 32), "down": nn.Linear(32, 8)}
    if name == "a write of a wider dtype":
        own["low"] = nn.Linear(8, 8, dtype=torch.bfloat16)
    if name == "an input in halves":
        own = {"small_up": nn.Linear(4, 4), "small_down": nn.Linear(4, 4)}
    if name == "bfloat16 between norms":
        low = torch.bfloat16
        own = {"norm": nn.LayerNorm(8), "low_up": nn.Linear(8, 32, dtype=low), "low_down": nn.Linear(32, 8, dtype=low)}
    if name == "complex weights":
        kind = torch.complex64
        own = {"complex_up": nn.Linear(8, 32, dtype=kind), "complex_down": nn.Linear(32, 8, dtype=kind)}
    model = Program(forward, **own, head=nn.Linear(8, 4))
    model.register_buffer("seen", torch.zeros(8))
    data = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(3)]
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def planned(name: str) -> Plan:
    _, _, parameters, outputs = CASES[name]
    if not parameters and not outputs:
        return roundelay.plan(job(name), workers=1, tensor_parallel=2, rule="1f1b", micro_batches=2)
    given = GivenSignatures(
        {"t": 2},
        {key: (("t", parse(text)),) for key, text in parameters.items()},
        {key: (("t", parse(text)),) for key, text in outputs.items()},
    )
    return roundelay.plan(job(name), workers=1, signatures=given, rule="1f1b", micro_batches=2)


@pytest.mark.parametrize("name", CASES)
def test_a_program_computes_on_a_mesh_what_it_computes_without(name: str) -> None:
    plan = planned(name)
    assert plan.mesh_size == 2
    found = roundelay.verify(job(name), plan=plan, steps=2)
    assert found.equal, found


@pytest.mark.parametrize(
    ("name", "wrong", "told"), [("head.weight", 1.05, True), ("low_up.weight", 1.1, True), ("", 1.0, False)]
)
def test_low_precision_in_a_model_hides_no_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: float, told: bool
) -> None:
    own, plan = job("bfloat16 between norms"), planned("bfloat16 between norms")
    computed, runs = fidelity_on_mesh._computed, []

    def second_is_wrong(*given: Any) -> Any:
        found = computed(*given)
        runs.append(found)
        if name and len(runs) == 2:  # that on the mesh
            found[1][name] *= wrong
        return found

    monkeypatch.setattr(fidelity_on_mesh, "_computed", second_is_wrong)
    (batch, *_) = own.batches(0)  # type: ignore[operator]
    found = fidelity_on_mesh.differs_on_mesh(roundelay.capture(own), plan, batch, 0)
    assert (name in found) if told else not found
