"""Run jobs with whichever Roundelay is on the path, and leave what each one computed as JSON.

Run by the command in a process of its own: ``python -m tests.same_bits.jobs SRC FOLDER NUMBER ...``. Only what
Roundelay documents is used: Job, plan, train, verify, load and the command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import roundelay
from tests.same_bits.models import LOSSES, MODELS, Batch
from tests.same_bits.state import Digests, NoStateError, final_state, number
from tests.same_bits.table import Case, cases

SEED = 3
ROWS = {"even": (12,), "short": (12, 12, 12, 12, 12, 6), "ragged": (11, 12, 7, 10)}
"""Rows of the batches, over and over; an epoch ends with the last that it has of them."""

BATCHES, STEPS = 6, 10
"""Batches of an epoch, and updates of a run: it ends within the second epoch."""

LONG_EPOCH, SAVED, STOPPED = 10, 5, 9
"""Of a job that goes on: batches of an epoch, updates at its checkpoint, batches read until it stops. Four stages have
made five updates after eight batches, and no run makes ten of nine: there is this one checkpoint."""

WAIT_S, COMMAND_S = 30.0, 100.0
STOP = "StoppedOnPurpose"  # one word: an error is printed in lines

Named = list[tuple[str, nn.Parameter]]


def _groups(named: Named) -> Optimizer:
    """Biases in a group of their own, with another rate and momentum."""
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if not name.endswith("bias")]},
        {"params": [parameter for name, parameter in named if name.endswith("bias")], "lr": 0.005, "momentum": 0.5},
    ]
    return SGD(groups, lr=0.02, momentum=0.9)


def _falling(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda update: 0.9**update)


def _one_cycle(optimizer: Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=4e-3, total_steps=50)


Scheduler = Callable[[Optimizer], LRScheduler] | None
OPTIMIZERS: dict[str, tuple[Callable[[Named], Optimizer], Scheduler]] = {
    "momentum": (partial(SGD, lr=0.02, momentum=0.9), _falling),
    "nesterov": (partial(SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01), None),
    "adam": (partial(Adam, lr=2e-3), _falling),
    "adamw": (partial(AdamW, lr=2e-3), _one_cycle),
    "groups": (_groups, None),
    "rmsprop": (partial(RMSprop, lr=1e-3), _falling),
}


@dataclass(frozen=True, slots=True)
class Data:
    """The batches of a job.

    Args:
        case: the job.
        armed: a path; as long as it exists, the loader stops in mid-flight. None: it never does.
        saved: the folder in which a checkpoint must be by then.
    """

    case: Case
    armed: Path | None = None
    saved: Path = Path()

    def __call__(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch."""
        generator = torch.Generator().manual_seed(100 + epoch)
        rows = ROWS[self.case.data]
        num = BATCHES if self.case.kind in ("train", "verify", "torchrun") else LONG_EPOCH
        for i in range(num):
            if i == STOPPED and epoch == 0 and self.armed is not None and self.armed.exists():
                self._stop()
            yield MODELS[self.case.model].draw(generator, rows[-1 if i == num - 1 else i % len(rows)])

    def _stop(self) -> None:
        """Raise when the checkpoint is whole; the stages have work in flight, of which no more comes."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                final_state(self.saved)
            except (NoStateError, OSError, ValueError, KeyError):
                time.sleep(0.01)
            else:
                raise RuntimeError(STOP)
        raise TimeoutError("no checkpoint came")


@dataclass(slots=True)
class Left:
    """What a job has computed, as JSON holds it.

    Args:
        digests: name to digest.
        losses: of every update.
        evaluations: digests, in order; a list of their own, since Roundelay evaluates in a thread of its own.
        refused: Roundelay's message, if it refused the job.
        failed: what else went wrong.
        seconds: that it took.
    """

    digests: Digests = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    refused: str = ""
    failed: str = ""
    seconds: float = 0.0

    def update(self, told: Any) -> None:
        """Keep what Roundelay tells of one update."""
        name = f"update {told.update:02}"
        self.losses.append(float(told.loss).hex())
        self.digests[f"{name} metrics"] = number(told.metrics)
        self.digests[f"{name} rates"] = number([told.learning_rates, told.loss_scale])


def make(case: Case, left: Left | None = None, armed: Path | None = None, saved: Path = Path()) -> roundelay.Job:
    """A job; what it evaluates is put into ``left``."""
    torch.manual_seed(SEED)
    chosen = MODELS[case.model]
    model = chosen.build().train()
    held_out = chosen.draw(torch.Generator().manual_seed(7), 8)
    optimizer, scheduler = OPTIMIZERS[case.optimizer]

    def evaluate(model: nn.Module) -> dict[str, float]:
        loss = float(LOSSES["mean"](model(held_out[0]), held_out))  # type: ignore[arg-type]
        if left is not None:
            left.evaluations.append(number(loss))
        return {"held out": loss}

    data = Data(case, armed, saved)
    return roundelay.Job(
        model=model, loss=LOSSES[case.loss], batches=data, optimizer=optimizer, scheduler=scheduler, evaluate=evaluate
    )


def choices(case: Case) -> dict[str, Any]:
    """What the plan of a job is made of."""
    given = {name: getattr(case, name) for name in ("rule", "backward", "transport", "precision")}
    given |= {"workers": case.workers, "micro_batches": case.micro_batches, "cuts": "equal", "deadline_s": 60.0}
    given |= {} if case.predictor == "none" else {"predictor": case.predictor}
    given |= {} if case.clip == "none" else {"clip": case.clip}
    given |= {} if case.recompute == "no" else {"recompute": [case.recompute]}
    given |= {} if case.ema == "no" else {"ema": float(case.ema)}
    return given | ({"loss_scale": "dynamic:65536:2"} if case.precision == "fp16" else {})


def train(case: Case, folder: Path, left: Left) -> None:
    """One run, from the first update to the last."""
    job = make(case, left)
    made = roundelay.plan(job, seed=SEED, **choices(case))
    saved = folder / "checkpoint"
    roundelay.train(job, plan=made, seed=SEED, steps=STEPS, save_to=saved, on_update=left.update, check="off")
    keep(case, job.model, saved, left)


def resume(case: Case, folder: Path, left: Left) -> None:
    """A run that stops with micro-batches in flight, and one that goes on from its only checkpoint to its end."""
    first, second = folder / "first", folder / "second"
    job = make(case, left, folder / "armed", first)
    made = roundelay.plan(job, seed=SEED, **choices(case))
    (folder / "armed").touch()
    began: dict[str, Any] = {"plan": made, "seed": SEED, "check": "off", "on_update": left.update}
    stopped(lambda: roundelay.train(job, epochs=2, save_to=first, checkpoint_every=SAVED, **began))
    left.digests |= {f"in mid-flight: {name}": digest for name, digest in final_state(first).items()}
    left.losses = left.losses[:SAVED]  # how many more were told depends on the moment
    left.digests = {n: d for n, d in left.digests.items() if not n.startswith("update") or int(n.split()[1]) < SAVED}
    job = make(case, left)
    roundelay.train(job, resume=first, save_to=second, **began)
    keep(case, job.model, second, left)


def stopped(train: Callable[[], object]) -> None:
    """Train until the loader stops it."""
    try:
        train()
    except roundelay.RoundelayError as error:
        if STOP not in str(error):
            raise
    else:
        raise RuntimeError("the run did not stop")


def verify(case: Case, folder: Path, left: Left) -> None:
    """A run held to its reference: whether both end with the same bits, and how many tensors were compared."""
    job = make(case)
    found = roundelay.verify(job, plan=roundelay.plan(job, seed=SEED, **choices(case)), seed=SEED, steps=8)
    left.digests["verification"] = number([found.equal, found.tensors, found.losses, found.steps])
    if not found.equal:
        left.failed = f"the run differs from its reference: {found.difference}"


def keep(case: Case, model: nn.Module, saved: Path, left: Left) -> None:
    """Digests of the checkpoint, of the model, and of what is loaded from the one into another such model."""
    left.digests |= final_state(saved)
    left.digests |= {f"model's {name}": of(tensor) for name, tensor in model.state_dict().items()}
    fresh = roundelay.load(MODELS[case.model].build(), saved, averaged=case.ema != "no")
    left.digests |= {f"loaded {name}": of(tensor) for name, tensor in fresh.state_dict().items()}


def of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes."""
    return number([str(tensor.dtype), list(tensor.shape), tensor.detach().contiguous().numpy().tobytes().hex()])


TRAIN = ("train", "job.py", "--plan", "plan.toml", "--no-baseline", "--check", "off", "--seed", str(SEED))
JOB_FILE = """
from pathlib import Path
from tests.same_bits import jobs
def job(seed):
    return jobs.make(jobs.cases()[{number}], armed={armed}, saved=Path("first/checkpoint"))
"""


def command(case: Case, folder: Path, left: Left) -> None:
    """As :func:`resume`, by ``roundelay plan`` and ``roundelay train``."""
    write_job(case, folder, 'Path("armed")')
    planning(case, folder)
    (folder / "armed").touch()
    code, told = roundelay_command(folder, *TRAIN, "--epochs", "2", "--checkpoint-every", str(SAVED), "--out", "first")
    if code == 0 or STOP not in told:
        raise RuntimeError(f"the first run did not stop: {told[-500:]}")
    (folder / "armed").unlink()
    code, told = roundelay_command(folder, *TRAIN, "--from", "first", "--out", "second")
    if code:
        raise RuntimeError(f"ended with {code}: {told[-500:]}")
    of_run(case, folder / "second", left)
    left.digests |= {f"in mid-flight: {name}": digest for name, digest in final_state(folder / "first").items()}


def torchrun(case: Case, folder: Path, left: Left) -> None:
    """One run, whose workers are processes that torchrun starts."""
    write_job(case, folder, "None")
    planning(case, folder)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.workers}", "-m", "roundelay"]
    code, told = python_command(folder, *launcher, *TRAIN, "--steps", str(STEPS), "--out", "run")
    if code:
        raise RuntimeError(f"ended with {code}: {told[-500:]}")
    of_run(case, folder / "run", left)


def write_job(case: Case, folder: Path, armed: str) -> None:
    """The job file of a job."""
    (folder / "job.py").write_text(JOB_FILE.format(number=cases().index(case), armed=armed))


def planning(case: Case, folder: Path) -> None:
    """Write ``plan.toml`` by the command line."""
    given = choices(case) | ({"recompute": case.recompute} if case.recompute != "no" else {})
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    code, told = roundelay_command(folder, "plan", "job.py", "--seed", str(SEED), *options, "--output", "plan.toml")
    if code:
        raise RuntimeError(f"no plan, {code}: {told[-500:]}")


def roundelay_command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command of Roundelay; its exit code and what it printed."""
    return python_command(folder, "roundelay", *arguments)


def python_command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a module in a folder, on the path of this process."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    return done.returncode, done.stdout


def of_run(case: Case, run: Path, left: Left) -> None:
    """What lies in a run's folder: losses, metrics, evaluations and the checkpoint."""
    for line in (run / "metrics.jsonl").read_text().splitlines():
        told = json.loads(line)
        left.losses.append(float(told["loss"]).hex())
        left.digests[f"update {told['update']:02} metrics"] = number(told.get("metrics"))
    for line in (run / "evaluations.jsonl").read_text().splitlines():
        told = json.loads(line)
        left.digests[f"evaluation at {told['update']}"] = number(told["metrics"])
    left.digests |= final_state(run)
    fresh = roundelay.load(MODELS[case.model].build(), run, averaged=case.ema != "no")
    left.digests |= {f"loaded {name}": of(tensor) for name, tensor in fresh.state_dict().items()}


KINDS = {"train": train, "resume": resume, "verify": verify, "command": command, "torchrun": torchrun}


def run(case: Case, folder: Path) -> Left:
    """Run one job in an empty folder; whatever it raises becomes words."""
    left, began = Left(), time.perf_counter()
    try:
        KINDS[case.kind](case, folder, left)
    except roundelay.RoundelayError as error:
        left.refused = f"{type(error).__name__}: {error}"
    except Exception as error:  # the others go on
        traceback.print_exc()
        left.failed = f"{type(error).__name__}: {error}"
    left.digests |= {f"evaluation {i}": digest for i, digest in enumerate(left.evaluations)}
    left.seconds = time.perf_counter() - began
    return left


def main(source: str, place: str, *numbers: str) -> None:
    """Run these jobs in turn, each in a folder of its own; ``left.json`` appears in it when it is done."""
    here = Path(roundelay.__file__).resolve()
    if Path(source).resolve() not in here.parents:
        raise SystemExit(f"roundelay was imported from {here}, not from {source}")
    torch.set_num_threads(1)
    every = cases()
    for which in numbers:
        folder = Path(place) / which
        folder.mkdir()
        sys.stderr.write(f"-- {every[int(which)].name}\n")
        left = run(every[int(which)], folder)
        made = {name: getattr(left, name) for name in Left.__slots__}
        (folder / "half").write_text(json.dumps(made))
        os.replace(folder / "half", folder / "left.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
