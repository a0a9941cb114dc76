"""Each option under each rule, predictor and mode, verified: ``python -m tests.options.every_rule``, some minutes.

The run with the option equals its reference, bit for bit, and what it ends with is what the option says: other weights
than without it, frozen ones untouched, statistics of every micro-batch once, or the very same weights where the option
only tells something. So one that run and reference ignore alike is seen. What a rule cannot have must be refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roundelay.errors import PlanError
from roundelay.ir.plan import Plan
from roundelay.ir.rule import register_rule, rule_named
from roundelay.job import Named
from roundelay.observe.digest import digest
from roundelay.schedules import schedule_named
from tests.equivalence.cells import Bench
from tests.equivalence.deep import DEEP, LINES, OWN, ROWS
from tests.zoo import ZOO, Entry
from tests.zoo.dense import class_loss

STAGES, MICRO_BATCHES, STEPS = 3, 3, 5
FROZEN = ("first.weight", "layers.3.bias", "layers.7.weight")

momentum: Callable[[Named], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)


def grouped(named: Named) -> Optimizer:
    """Biases at a quarter of the rate."""
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    others = [parameter for name, parameter in named if not name.endswith("bias")]
    return SGD([{"params": others}, {"params": biases, "lr": 0.0125}], lr=0.05, momentum=0.9)


def scheduled(optimizer: Optimizer) -> LambdaLR:
    """Another rate for every update."""
    return LambdaLR(optimizer, lambda update: 1 / (1 + update))


def told(outputs: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The loss, and beside it how many are right."""
    return {"loss": class_loss(outputs, batch), "right": (outputs.argmax(-1) == batch[1]).float().mean()}


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Args:
        plan: fields of the plan that say it.
        job: fields of the job that do.
        model: a key of :data:`BENCHES`.
        ends: what is expected of the run's end: ``other`` weights than without it, the ``same``, or a key's own check.
        beside: options whose ends it is told from: none unless told, or what it is made of.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    model: str = "plain"
    ends: str = "other"
    beside: tuple[str, ...] = ("",)


TOO_LARGE = "dynamic:4194304:2"
"""A loss scale by which gradients overflow until some updates are skipped."""

OPTIONS = {
    "M": Option(plan={"micro_batches": 4}),
    "clip stage": Option(plan={"clip": "stage:0.05"}),
    "clip previous": Option(plan={"clip": "previous:0.05"}),
    "clip global": Option(plan={"clip": "global:0.05"}),
    "schedule": Option(job={"scheduler": scheduled}),
    "groups": Option(job={"optimizer": grouped}),
    "bf16": Option(plan={"precision": "bf16"}),
    "recompute": Option(plan={"recompute": ("all",)}, ends="recomputed"),
    "fp16": Option(plan={"precision": "fp16", "loss_scale": "1024"}),
    "loss scale": Option(plan={"precision": "fp16", "loss_scale": TOO_LARGE}, beside=("fp16",)),
    "frozen": Option(model="frozen", ends="frozen"),
    "BatchNorm": Option(model="norm", ends="counted"),
    "metrics": Option(model="told", ends="same"),
}
COMPILED = {
    "compile": Option(plan={"compile": True}),
    "compile bf16": Option(plan={"compile": True, "precision": "bf16"}, beside=("compile", "bf16")),
    "compile fp16": Option(
        plan={"compile": True, "precision": "fp16", "loss_scale": "1024"}, beside=("compile", "fp16")
    ),
}
"""Asked for apart: take minutes more."""


def _frozen() -> Bench:
    model = DEEP.build(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    return Bench(DEEP, model, DEEP.batches(0, len(ROWS)))


def _of(entry: Entry) -> Bench:
    return Bench(entry, batches=entry.batches(0, len(ROWS), short=True))


BENCHES: dict[str, Callable[[], Bench]] = {
    "plain": lambda: _of(DEEP),
    "frozen": _frozen,
    "norm": lambda: _of(ZOO["batchnorm"]),
    "told": lambda: _of(dataclasses.replace(DEEP, loss=told)),  # type: ignore[arg-type]
}


@cache
def bench(model: str) -> Bench:
    """A model, captured once."""
    return BENCHES[model]()


@cache
def ran(line: str, option: str) -> tuple[str, str]:
    """What differs between a run and its reference, and the bits that the run ends with; '' stands for no option."""
    chosen = (OPTIONS | COMPILED)[option] if option else Option()
    place = bench(chosen.model)
    found = place.verify(_plan(line, option), place.job(**({"optimizer": momentum} | chosen.job)), steps=STEPS)
    return found.difference, digest(dict(place.model.named_parameters()))


def _plan(line: str, option: str) -> Plan:
    chosen = (OPTIONS | COMPILED)[option] if option else Option()
    return dataclasses.replace(bench(chosen.model).plan(LINES[line], STAGES, MICRO_BATCHES), **chosen.plan)


def refused(line: str, option: str) -> bool:
    """Whether a rule must refuse an option: no norm of a batch's own without a flush, no compiled halves, no compiled
    tape in which weights are to be exchanged for others that are cast, and nothing that a mode does already.
    """
    schedule, mode = schedule_named(rule_named(LINES[line].rule).schedule), LINES[line].backward
    return (
        (option == "recompute" and mode == "recompute")
        or (option in COMPILED and schedule.halved)
        or (option in ("compile bf16", "compile fp16") and mode == "mixed")
        or (option == "clip global" and schedule.window != "batch")
    )


def outcome(line: str, option: str) -> str:
    """'' if all is as it should be, otherwise what is not."""
    try:
        difference, bits = ran(line, option)
    except PlanError as error:
        return "" if refused(line, option) else str(error)
    except Exception as error:  # what raises is wrong, and the others go on
        return f"{type(error).__name__}: {error}"
    if refused(line, option):
        return "not refused"
    return difference or _ends((OPTIONS | COMPILED)[option], line, bits)


def _ends(option: Option, line: str, bits: str) -> str:
    """What is wrong with the end of a run."""
    if option.ends in ("other", "same"):
        same = any(bits == ran(line, name)[1] for name in option.beside)
        found = "those" if same else "others than those"
        return "" if same == (option.ends == "same") else f"the weights are {found} without it"
    if option.ends == "recomputed":
        return _recomputed(line, bits)
    place = bench(option.model)
    if option.ends == "frozen":
        still = {n for n, p in place.model.named_parameters() if torch.equal(p, place.state[n])}
        return "" if still == set(FROZEN) else f"unchanged: {still}"
    counted = {int(b) for n, b in place.model.named_buffers() if n.endswith("num_batches_tracked")}
    rows = [batch[0].size(0) for batch in place.batches[:STEPS]]  # type: ignore[index]
    parts = sum(min(MICRO_BATCHES, max(1, count // 2)) for count in rows)  # BatchNorm asks for two rows in each
    return "" if counted == {parts} else f"counted {counted} micro-batches of {parts}"


def _recomputed(line: str, bits: str) -> str:
    """The same weights as without by stash; by mixed, with every segment run again, those of the mode recompute, but
    for the loss's part: where the last stage's two passes read different weights, that mode runs it again, too.
    """
    chosen = LINES[line]
    if chosen.backward == "mixed" and chosen.predictor == "released-code":
        return "" if bits != ran(line, "")[1] else "the weights are those without it"
    whole = [n for n, v in LINES.items() if v == dataclasses.replace(chosen, backward="recompute")]
    same = bits == ran(whole[0] if chosen.backward == "mixed" else line, "")[1]
    return "" if same else "other weights than it must end with"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.options.every_rule", description="Options under every rule.")
    parser.add_argument("--compile", action="store_true", help="compiled stages as well: minutes more")
    options = OPTIONS | (COMPILED if parser.parse_args(arguments).compile else {})
    torch.set_num_threads(1)
    for rule in OWN:
        register_rule(rule)
    console, began, wrong = Console(), time.perf_counter(), list[str]()
    table = Table("rule, predictor, mode", *options, box=SIMPLE_HEAD, padding=0)
    for line in track(LINES, console=console, description="options"):
        found = {option: outcome(line, option) for option in options}
        wrong += [f"{line}, {option}: {what}" for option, what in found.items() if what]
        table.add_row(line, *(_told(line, option, what) for option, what in found.items()))
    table.caption = f"{len(LINES) * len(options)} cells, {len(wrong)} wrong; {time.perf_counter() - began:.0f} s"
    console.print(table)
    for what in wrong:
        console.print(f"[red]wrong[/] {what}", highlight=False)
    return 1 if wrong else 0


def _told(line: str, option: str, what: str) -> str:
    if what:
        return "[red]wrong[/]"
    return "refused" if refused(line, option) else "equal"


if __name__ == "__main__":
    sys.exit(main())
