"""What it costs to run a backward in two halves: inputs' gradients first, weights' later.

The whole backward of a captured stage (one run of autograd) and its two halves take turns on the same batch, from the
gradient of the stage's output, one intra-op thread. The stage's input wants a gradient, as it does on every stage but
the first. The gradients of both are compared, to the bit, before anything is measured. Two plain calls of
``torch.autograd.grad``, one for the inputs and one for the weights, are the rival. Told is the CPU time of the one
thread that computes: other work on the machine does not count, except by what it takes of caches.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.stage_functions.run import BLOCKS, loss
from roundelay.frontend import RngKey
from roundelay.frontend.stages.segment import Segment
from roundelay.frontend.stages.split_backward import settle
from roundelay.lower.partition import partition

Grads = dict[str, torch.Tensor]
Timed = Callable[[], tuple[float, float, float]]


def perceptron(width: int) -> nn.Module:
    """Four layers."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **BLOCKS,
    "MLP, 4 layers of 1024": (lambda: perceptron(1024), (64, 1024)),
    "MLP, 4 layers of 256": (lambda: perceptron(256), (128, 256)),
    "MLP, 4 layers of 64": (lambda: perceptron(64), (32, 64)),
}


class Halves:
    """One captured case, its segment whole and halved."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        job = roundelay.Job(
            model=model,
            loss=loss,
            batches=lambda epoch: [{"x": x}],
            inputs=lambda batch: ((batch["x"],), {}),
            optimizer=lambda named: torch.optim.SGD(named),
        )
        captured = roundelay.capture(job)
        spec = partition(captured.graph, [(captured.graph.ops[-1].name,)]).stages[0]
        wanted = frozenset(spec.segments[0].inputs)
        self.whole, self.halved = (
            replace(captured.stage(spec, halved=halved).segments[0], differentiable=wanted) for halved in (False, True)
        )
        self.parameters, self.buffers = captured.parameters(), dict(captured.buffers())
        self.inputs = {name: captured.values({"x": x})[name] for name in self.whole.spec.inputs}
        made, _ = self.forward(self.whole)
        self.grads: Any = {name: torch.randn_like(value) for name, value in made.items() if torch.is_tensor(value)}

    def forward(self, segment: Segment) -> Any:
        """Outputs and tape."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return segment.forward(self.parameters, buffers, self.inputs, RngKey(0, 0))

    def at_once(self) -> tuple[Grads, list[float]]:
        """All gradients, and seconds of forward and backward."""
        marks = [time.thread_time()]
        _, tape = self.forward(self.whole)
        marks.append(time.thread_time())
        of_inputs, of_parameters = self.whole.backward(tape, self.grads, self.parameters)
        marks.append(time.thread_time())
        return of_inputs | of_parameters, marks

    def in_halves(self) -> tuple[Grads, list[float]]:
        """The same, and seconds of forward and each half."""
        marks = [time.thread_time()]
        _, tape = self.forward(self.halved)
        marks.append(time.thread_time())
        of_inputs, of_parameters = self.halved.backward(tape, self.grads, self.parameters)
        marks.append(time.thread_time())
        late = settle(tape.pending, tape.parameters)
        marks.append(time.thread_time())
        return of_inputs | of_parameters | late, marks

    def in_two_calls(self) -> tuple[Grads, list[float]]:
        """The same by two calls of autograd on the whole graph."""
        marks = [time.thread_time()]
        _, tape = self.forward(self.whole)
        marks.append(time.thread_time())
        roots = list(tape.roots.values())
        grads = [self.grads[name] for name in tape.roots]
        made = dict(zip(tape.inputs, torch.autograd.grad(roots, list(tape.inputs.values()), grads, True), strict=True))
        marks.append(time.thread_time())
        late = torch.autograd.grad(roots, list(tape.parameters.values()), grads)
        marks.append(time.thread_time())
        return made | dict(zip(tape.parameters, late, strict=True)), marks


def main() -> None:
    what = asked(__doc__ or "", 5)
    times = 10 if what.short else 60
    rows, numbers = [], {}
    for name, (build, shape) in CASES.items():
        torch.manual_seed(0)
        case = Halves(build(), torch.randn(shape))
        ways = {"whole": case.at_once, "halves": case.in_halves, "two calls": case.in_two_calls}
        wanted = case.at_once()[0]
        for way in ways.values():
            made = way()[0]
            assert made.keys() == wanted.keys() and all(torch.equal(made[n], wanted[n]) for n in wanted)
        found: dict[str, list[list[float]]] = {way: [] for way in ways}
        for turn in range(times * what.repeats + 5):
            for way, once in ways.items():
                marks = once()[1]
                if turn >= 5:
                    found[way].append([end - start for start, end in itertools.pairwise(marks)])
        middle = {way: [statistics.median(part) for part in zip(*all_, strict=True)] for way, all_ in found.items()}
        forward, whole = middle["whole"]
        back = {way: statistics.median(sum(one[1:]) for one in found[way]) / whole for way in ("halves", "two calls")}
        all_of = statistics.median(sum(one) for one in found["halves"]) / statistics.median(map(sum, found["whole"]))
        cells = [f"{1e3 * seconds:.2f}" for seconds in (forward, whole, *middle["halves"])]
        late = f"{len(case.halved.halves.late if case.halved.halves else ())} of {len(case.parameters)}"
        rows.append([name, *cells, f"{back['halves']:.3f}", f"{all_of:.3f}", f"{back['two calls']:.3f}", late])
        numbers[name] = found
    columns = ["", "forward, ms", "whole backward", "forward for halves", "inputs' half", "weights' half"]
    columns += ["halves, x whole", "with forward", "two calls, x whole", "parameters in the second half"]
    report(what, table(columns, rows), {"seconds": numbers})


if __name__ == "__main__":
    main()
