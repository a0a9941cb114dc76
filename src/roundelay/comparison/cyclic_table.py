"""Table 1 of Cyclic Data Parallelism: costs counted from programs and from runs, beside the paper's formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from roundelay.comparison.cyclic_costs import Costs, chain, count
from roundelay.ir.plan import Plan
from roundelay.ir.program import EDGES, STATES, SUMS
from roundelay.job import Job
from roundelay.lower.channels import channels_of
from roundelay.lower.reading import read
from roundelay.planning.planning import capture, plan
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

WIDTH, ROWS, STEPS = 16, 2, 4
"""Of the model that runs: features of each stage, rows of a micro-batch, and updates."""


@dataclass(frozen=True, slots=True)
class Row:
    """One form.

    Args:
        name: as the paper has it.
        choices: of its plan, if not as usual: rule, layout, stages, replicas, micro-batches, split states.
        activations: the paper's, in B Psi_A.
        parameters: the paper's, in Psi_P; each version counted once.
        gradients: the paper's factor of Psi_P in the volume.
        messages: the paper's factor of B Psi_A^int in the volume.
        steps: the paper's largest number of communication steps between two time steps.
        devices: the paper's.
        parts: micro-batches into which one of the paper's, of B rows, is cut.
    """

    name: str
    choices: Mapping[str, Any]
    activations: str
    parameters: str
    gradients: str
    messages: str
    steps: str
    devices: str
    parts: int = 1


def rows(size: int) -> Iterator[Row]:
    """The rows of the paper's table for N stages and micro-batches, and what its readers would compare them with."""
    n, half = size, Fraction(size + 1, 2)
    one, part = {"micro_batches": n}, str(Fraction(1, n))
    single, dp = {"layout": "single", **one}, {"layout": "dp", "replicas": n}
    yield Row("single device, DP", {"rule": "gpipe", **single}, str(n), f"1 or {n}", "0", "0", "0", "1")
    yield Row("  gradient accumulation", {"rule": "1f1b", **single}, "1", "1", "0", "0", "0", "1")
    for rule, shared in (("cdp-v1", "2"), ("cdp-v2", f"at most {2 - Fraction(1, n)}")):
        yield Row(f"  cyclic, {rule}", {"rule": rule, **single}, f"at most {half}", shared, "0", "0", "0", "1")
    yield Row("several devices, DP", {"rule": "1f1b", **dp}, "1", "1", "1", "0", f"ring {2 * (n - 1)}", str(n))
    for rule in ("cdp-v1", "cdp-v2"):
        yield Row(f"  cyclic, {rule}", {"rule": rule, **dp}, "1", "1", "1", "0", "O(1)", str(n))
    yield Row("DP with MP", {"rule": "gpipe", "replicas": n}, part, part, "1", "1", f"ring {2 * (n - 1)}", str(n * n))
    for rule in ("cdp-v1", "cdp-v2"):
        mp = {"rule": rule, "layout": "mp", **one}
        yield Row(f"  cyclic, {rule}", mp, part, part, "1/2", "1", "O(1)", str(n * (n + 1) // 2))
    both = {"rule": "1f1b", "replicas": n, **one}
    yield Row("  PP with DP", both, part, part, "1", "1", f"ring {2 * (n - 1)}", str(n * n), n)
    for rule in ("cdp-v1", "cdp-v2"):
        yield Row(f"PP, {rule}", {"rule": rule, **one}, "1", f"{part} a version", "0", "1", "O(1)", str(n))
    level_1 = {"rule": "1f1b", "num_stages": 1, "replicas": n, "split_states": True}
    yield Row("ZeRO-DP, states only", level_1, "1", f"{part} if all is split", "1", "0", f"ring {2 * (n - 1)}", str(n))
    for rule in ("cdp-v1", "cdp-v2"):
        zero = {"rule": rule, "layout": "zero", "replicas": n}
        yield Row(f"ZeRO-DP, cyclic, {rule}", zero, "1", f"{part} a version", "1", "0", "O(1)", str(n))


@dataclass(frozen=True, slots=True)
class Counted:
    """A row, what was counted, and what a run has sent.

    Args:
        row: the form.
        costs: counted from its programs.
        sent: bytes of gradients or states that a run has sent per update, as a share of 2 (N - 1) Psi_P; None if it
            did not run.
    """

    row: Row
    costs: Costs
    sent: float | None


def counted_table(size: int, *, runs: bool) -> Iterator[Counted]:
    """Count every row.

    Args:
        size: N, stages of the model and micro-batches of a batch.
        runs: whether to train a small model in each form, in threads of this process, and count what is sent.
    """
    for row in rows(size):
        costs = costs_of(row, size)
        yield Counted(row, costs, sent_by_run(size, row) if runs and costs.devices > 1 else None)


def costs_of(row: Row, size: int) -> Costs:
    """Count a row for N stages and micro-batches."""
    return count(chain(**{"num_stages": size, **row.choices}), size, row.parts)


def sent_by_run(size: int, row: Row) -> float:
    """Bytes of gradients or states that a run of equal stages sends per update, as a share of 2 (N - 1) Psi_P."""
    job = _job(size, ROWS * size * row.parts)
    chosen = dict(row.choices)
    if replicas := chosen.pop("replicas", 0):
        chosen = ({} if "layout" in chosen else {"micro_batches": 1}) | chosen | {"data_parallel": replicas}
    if chosen.pop("split_states", False):
        chosen["zero"] = 1
    stages = chosen.pop("num_stages", size)
    chosen |= {"stages": stages} if "layout" in chosen else {"workers": stages}
    captured = capture(job)
    ends = ["linear", *(f"linear_{k}" for k in range(1, stages - 1))] if stages > 1 else []
    planned = plan(job, captured=captured, cuts=",".join(ends) or "equal", transport="memory", **chosen)
    trained = Session(job, captured, planned, 0, Length(steps=STEPS)).run(notify=lambda event: None)
    kinds = _counted_channels(planned)
    num_bytes = sum(
        sent
        for worker in trained.workers.values()
        for number, sent in worker["bytes_sent"].items()
        if int(number) in kinds
    )
    model = 4 * WIDTH * WIDTH * size
    return float(num_bytes) / STEPS / (2 * max(1, size - 1) * model)


def _counted_channels(planned: Plan) -> set[int]:
    return {
        channel.id
        for channel in channels_of(read(planned))
        if channel.kind in (*SUMS, *STATES) or (channel.phases and channel.kind not in EDGES)
    }


def _job(size: int, rows: int) -> Job:
    """A chain of equal stages without biases."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(size)))

    def batches(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(epoch)
        return [(torch.randn(rows, WIDTH, generator=generator), torch.zeros(rows, WIDTH))] * STEPS

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, batch[1])

    return Job(model=model, loss=loss, batches=batches, optimizer=lambda named: torch.optim.SGD(named, lr=0.01))
