"""Bytes that a plan is predicted to hold, beside the tensors that live in a run of it: of the busiest worker.

Three models, AdamW, on two processes of one thread over shared memory: one process, the same with everything computed
again, 1f1b on two stages, data parallel, ZeRO-3, and tensor parallel. Predicted are the bytes by which a search keeps
``--memory-limit``: from facts of the model (`planner/price.py`), by items (`planner/memory_model.py`); and those of the
same plan with measured stages, by which ``roundelay plan`` keeps it. Live are all tensors of a process but those of the
captured model and the job, which it has from the launcher, and the next batch: each storage once, those that autograd
has saved among them, of memory that workers share a worker's part; the most after any operator, and the most between
instructions, where what lives within one alone is gone. A prediction adds up peaks of items that need not meet.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.tensor_parallel import run as gpt
from roundelay import Job
from roundelay.actor.machine import Run
from roundelay.frontend import Captured
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.launching.forked_call import isolated
from roundelay.planner.memory_model import estimate_memory
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import priced
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.memory_limit import predicted_memory
from roundelay.planning.planning import plan_with_reasons
from roundelay.runtime.handlers import HANDLERS, Context, Handler
from roundelay.session.training import Length, Session

MB, STEPS, LIMIT_S = 1e6, 4, 120.0
ITEMS = ("weights", "gradients", "optimizer", "versions", "tapes", "messages")
PLANS: dict[str, dict[str, Any]] = {
    "one process": {"workers": 1, "micro_batches": 2},
    "one process, recomputed": {"workers": 1, "micro_batches": 2, "recompute": "all"},
    "1f1b, 2 stages": {"workers": 2, "micro_batches": 4},
    "data parallel x 2": {"workers": 1, "data_parallel": 2, "micro_batches": 1},
    "ZeRO-3 x 2": {"workers": 1, "data_parallel": 2, "zero": 3, "micro_batches": 1},
    "tensor parallel x 2": {"workers": 1, "tensor_parallel": 2, "micro_batches": 1},
}


class Residual(nn.Module):
    """Two convolutions beside a path past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Rows x channels x height x width."""
        y = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(y))).relu()


def images() -> nn.Module:
    """A residual network on small images."""
    torch.manual_seed(0)
    ends = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *(Residual(64) for _ in range(3)), *ends)


def perceptron() -> nn.Module:
    """Eight layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def numbers(*shape: int) -> tuple[Tensor, Tensor]:
    """A batch of random numbers with labels."""
    made = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=made), torch.randint(10, shape[:1], generator=made)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]] = {
    "GPT": (lambda: gpt.model(256, 4), gpt.data(16)),
    "perceptron": (perceptron, numbers(512, 512)),
    "images": (images, numbers(16, 3, 24, 24)),
}


def job_of(name: str) -> Job:
    """A model to train."""
    build, batch = MODELS[name]
    return Job(
        model=build(),
        loss=lambda outputs, batch: cross_entropy(outputs.flatten(0, -2), batch[1].flatten()),
        batches=lambda epoch: [tuple(part.clone() for part in batch) for _ in range(STEPS)],
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that live, those of autograd among them, at the ends of instructions.

    Args:
        out: folder for the most of each worker.
        before: addresses of storages that the launcher has made.
        workers: that share memory.
    """

    def __init__(self, out: Path, before: set[int], workers: int) -> None:
        super().__init__()
        self._out, self._before, self._workers = out, before, workers
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = {"between": 0, "within": 0}
        self._shared: list[range] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._note(found)
        self._count("within")
        return found

    def _note(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu":
                storage = value.untyped_storage()
                self._seen[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()

    def around(self, handler: Handler) -> Handler:
        """A handler after which the living are counted."""

        def counted(context: Context, run: Run) -> MicroBatch | None:
            scans = run.instruction.opcode == "update" or not self._seen
            self._shared = self._shared or shared_memory()
            with self:
                done = handler(context, run)
            came = [value for message in context.inbox.values() for value in message.values]
            self._note([tensors() if scans else [], came, *context.values.values(), *context.grads.values()])
            self._count("between")
            (self._out / str(context.worker)).write_text(json.dumps(self._most))
            return done

        return counted

    def _count(self, when: str) -> None:
        self._seen = {place: own for place, own in self._seen.items() if not own[0].expired()}
        own = {place: size for place, (_, size) in self._seen.items() if place not in self._before}
        sharing = (self._workers if any(place in part for part in self._shared) else 1 for place in own)
        live = sum(size // count for size, count in zip(own.values(), sharing, strict=True))
        self._most[when] = max(self._most[when], live)


def tensors() -> list[Tensor]:
    """All that Python knows of."""
    gc.unfreeze()  # what a worker has from the launcher
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]


def shared_memory() -> list[range]:
    """Addresses that this process shares with others."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines if line[1][3] == "s"]


def live_bytes(job: Job, captured: Captured, plan: Plan) -> list[dict[str, int]]:
    """The most of each worker in a short run."""
    with tempfile.TemporaryDirectory() as out:

        def run() -> bool:
            live = Live(Path(out), {own.untyped_storage().data_ptr() for own in tensors()}, plan.num_workers)
            handlers = {opcode: live.around(handler) for opcode, handler in HANDLERS.items()}
            session = Session(job, captured, plan, 0, Length(steps=STEPS))
            by_stage = dict.fromkeys(range(plan.num_stages), handlers)
            session.run(notify=lambda event: None, gathers="nothing", handlers=by_stage)
            return True

        isolated(run, "a short run", limit_s=LIMIT_S, quiet=True)
        return [json.loads((Path(out) / str(worker)).read_text()) for worker in range(plan.num_workers)]


def compared(source: Examined, facts: ModelFacts, choices: Choices) -> dict[str, Any]:
    """Predictions and measurement of the worker that holds most."""
    made = priced(facts, choices, hardware_here())
    found = estimate_memory(made.plan, made.state_bytes or (), made.again_bytes)
    cuts = [list(stage.segments) for stage in made.plan.stages] if made.plan.mesh_size == 1 else None
    plan = plan_with_reasons(source.job, replace(choices, cuts=cuts), captured=source.captured).plan
    live = live_bytes(source.job, source.captured, plan)
    most = max(range(len(live)), key=lambda worker: live[worker]["within"])
    of_stages = predicted_memory(source, plan) or ()
    return {
        **live[most],
        "search": max(one.total for one in found),
        "plan": max(one.total for one in of_stages),
        "items": found[most].items(),
        "measured items": of_stages[most].items(),
    }


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    live = found["within"]
    figures = [f"{found['between'] / MB:.2f}", f"{live / MB:.2f}"]
    figures += [f"{found[how] / MB:.2f} ({found[how] / live - 1:+.0%})" for how in ("search", "plan")]
    items = (f"{found['items'][item] / MB:.2f}" for item in ITEMS)
    tapes = f"{found['measured items']['tapes'] / MB:.2f}"
    return [name, *figures, *items, tapes]


def main() -> None:
    what = asked(__doc__ or "", 1)
    rows, told = [], {}
    for model in MODELS:
        job = job_of(model)
        source = Examined(job, roundelay.capture(job), 0, lambda *_: None)
        facts = collect_facts(source)
        for name, own in PLANS.items():
            choices = Choices(rule="1f1b", transport="shm", devices="cpu", threads=1, **{"recompute": "none"} | own)
            try:
                found = compared(source, facts, choices)
            except roundelay.RoundelayError as error:
                rows.append([f"{model}: {name}", f"{error.subject}: {error.got}"] + [""] * (len(ITEMS) + 4))
                continue
            told[f"{model}: {name}"] = found
            rows.append(row(f"{model}: {name}", found))
    columns = ["MB", "between", "live", "predicted by a search", "by a plan", *ITEMS, "tapes of the plan"]
    report(what, table(columns, rows), {"bytes": told})


if __name__ == "__main__":
    main()
