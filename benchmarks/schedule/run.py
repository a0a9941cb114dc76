"""Schedules on stages that sleep: D = 4, a forward of 20 ms, a backward of 40 ms, 8 micro-batches.

Sleeping gives the core away, so four stages run at their own speed on two cores, and what is left is the schedule and
the runtime's own time. Rival: torch.distributed.pipelining. Its input gradient and its weight gradient sleep 20 ms
each, in autograd nodes of their own, as its zero-bubble schedules need it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundelay
from benchmarks import rival
from benchmarks.common import alternate, asked, report, slope, spread, table
from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.rule import rule_named
from roundelay.runtime.handlers import Context, do_backward, do_backward_weight, do_forward
from roundelay.schedules import schedule_named
from roundelay.session.training import Length, Session

F, B, D, M, WIDTH = 0.020, 0.040, 4, 8, 16
BOTH = ("gpipe", "1f1b", "pipeoptim mixed")
SHORT = ("torch 1F1B", "torch ZBV", "ours 1f1b", "ours interleaved-1f1b", "ours zb-h1", "ours zb-v", "ours pipedream")
SHORT += ("ours pipeoptim mixed",)


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Sleeper(nn.Module):
    """A linear layer whose forward, input gradient and weight gradient sleep."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))  # before the input's node, which then runs in the first stage too
        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Sleep.apply(x + self.shift, F * self.share, B / 2 * self.share)  # type: ignore[no-untyped-call]
        weight = Sleep.apply(self.weight, 0.0, B / 2 * self.share)  # type: ignore[no-untyped-call]
        return nn.functional.linear(x, weight)


def theirs(schedule: str, steps: int) -> float:
    """Milliseconds of 8 micro-batches, which is one step: the slope between the ends of the first step and the last."""
    held = len(rival.SCHEDULES[schedule][1](0, D))
    found = rival.run(schedule, D, M, steps, WIDTH, lambda stage, count: Sleeper(1 / held))
    return 1e3 * slope(list(enumerate(found[0]["ends"])))


def stages(rule: str) -> int:
    """Of all workers."""
    return D * schedule_named(rule_named(rule).schedule).stages_per_worker


def job(layers: int = D) -> roundelay.Job:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def batches(epoch: int) -> Any:
        while True:
            yield {"x": torch.randn(4 * M, WIDTH), "y": torch.randn(4 * M, WIDTH)}

    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch["y"]),
        batches=batches,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


@functools.cache
def session(rule: str, backward: str, transport: str, updates: int) -> Session:
    made = job(stages(rule))
    captured = roundelay.capture(made)
    ends = [(op.name,) for op in captured.graph.ops if "linear" in op.target]
    plan = roundelay.plan(
        made,
        captured=captured,
        cuts=ends,
        workers=D,
        rule=rule,
        backward=backward,
        transport=transport,
        micro_batches=M,
    )
    return Session(made, captured, plan, 0, Length(steps=updates))


def asleep(seconds: float, handler: Callable[[Context, Run], MicroBatch | None]) -> Any:
    """A handler that sleeps first."""

    def slow(context: Context, run: Run) -> MicroBatch | None:
        time.sleep(seconds)
        return handler(context, run)

    return slow


def ours(rule: str, backward: str, transport: str, updates: int) -> float:
    """Milliseconds of 8 micro-batches: the slope over the batches' ends at the last stage, from the second batch on."""
    count = stages(rule)
    share = D / count
    back = B + (F if backward == "recompute" and rule != "gpipe" else 0.0)
    handlers = {"forward": asleep(F * share, do_forward), "backward": asleep(back * share, do_backward)}
    if schedule_named(rule_named(rule).schedule).halved:
        halves = asleep(B / 2 * share, do_backward), asleep(B / 2 * share, do_backward_weight)
        handlers |= dict(zip(("backward", "backward-weight"), halves, strict=True))
    trained = session(rule, backward, transport, updates).run(
        notify=lambda event: None, handlers=dict.fromkeys(range(count), handlers)
    )
    events = [event for events in trained.events.values() for event in events]
    ends = [e.end_s for e in events if e.opcode == "backward" and e.g % M == M - 1 and e.stage == count - 1]
    return 1e3 * slope(list(enumerate(ends[1:])))


def main() -> None:
    what = asked(__doc__ or "", 5)
    updates = 3 if what.short else 8
    mine = {
        "gpipe": ("gpipe", "stash", M * (F + B) + (D - 1) * (F + B)),
        "1f1b": ("1f1b", "stash", M * (F + B) + (D - 1) * (F + B)),
        "interleaved-1f1b": ("interleaved-1f1b", "stash", M * (F + B) + (D - 1) * (F + B) / 2),
        "zb-h1": ("zb-h1", "stash", M * (F + B) + (D - 1) * F),
        "zb-v": ("zb-v", "stash", M * (F + B)),
        "pipedream": ("pipedream", "stash", M * (F + B)),
        "pipeoptim stash": ("pipeoptim", "stash", M * (F + B)),
        "pipeoptim mixed": ("pipeoptim", "mixed", M * (F + B)),
        "pipeoptim recompute": ("pipeoptim", "recompute", M * (2 * F + B)),
    }
    bounds = dict.fromkeys(("torch GPipe", "torch 1F1B"), (M + D - 1) * (F + B))
    candidates: dict[str, Callable[[], float]] = {}
    for name in rival.SCHEDULES:
        candidates[f"torch {name}"] = functools.partial(theirs, name, 2 if what.short else 5)
    for name, (rule, backward, bound) in mine.items():
        for transport in ("shm", "gloo") if name in BOTH and not what.short else ("shm",):
            title = f"ours {name}" + (" over gloo" if transport == "gloo" else "")
            candidates[title] = functools.partial(ours, rule, backward, transport, updates)
            bounds[title] = bound
    if what.short:
        candidates = {name: candidates[name] for name in SHORT}
    found = alternate(candidates, what.repeats)
    base = statistics.median(found["torch 1F1B"])
    rows = []
    for name, values in found.items():
        middle = statistics.median(values)
        ideal = f"{1e3 * bounds[name]:.0f}" if name in bounds else ""
        share = f"{1e5 * bounds[name] / middle:.1f} %" if name in bounds else ""
        rows.append([name, spread(values, 0), ideal, share, f"{base / middle:.2f}"])
    columns = ["schedule", "ms per 8 micro-batches", "ideal, ms", "of ideal rate", "x torch 1F1B"]
    report(what, table(columns, rows), {"ms": found})


if __name__ == "__main__":
    main()
