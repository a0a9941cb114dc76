"""Which rules survive depth 8 and 16: digits and characters, SGD with momentum, Adam and AdamW, five seeds.

Every rule sees the same batches from the same weights; a batch is one update under all of them. Rules with M = D cut it
into D micro-batches, so that at most one update is crossed; M = 1 is what the papers have. Results go, line by line,
into a file, and runs that it holds are not done again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import machine, table
from benchmarks.depth.trial import Net, Optimizer, Trial, Variant
from roundelay.ir.clip import NO_CLIP
from roundelay.ir.loss_scale import NO_SCALE
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import NO_PREDICTOR, rule_named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.simulator import simulate

WIDTH, SEEDS, POINTS = 64, 5, 15
DEPTHS, OPTIMIZERS = (8, 16), ("sgdm", "adam", "adamw")
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: a variant and how the simulator is to be asked for it."""

    variant: Variant
    rule: str
    predictor: str = NO_PREDICTOR
    backward: str = "stash"


def _line(name: str, rule: str, predictor: str = NO_PREDICTOR, backward: str = "stash", **more: Any) -> Line:
    predicts = "" if predictor == NO_PREDICTOR else predictor
    return Line(Variant(name, predicts=predicts, backward=backward, **more), rule, predictor, backward)  # type: ignore[arg-type]


LINES = (
    _line("1f1b M=D", "1f1b", reads="now", full=False),  # the batch's gradient is the same for every M
    _line("pipedream M=1", "pipedream", full=False),
    _line("pipeoptim improved mixed M=1", "pipeoptim", "improved", "mixed", full=False),
    _line("pipeoptim paper recompute M=1", "pipeoptim", "paper", "recompute", full=False),
    _line("spectrain M=1", "spectrain", "improved", "mixed", full=False, aim="entry"),
    _line("pipeoptim, at most 1 ahead, M=1", "pipeoptim", "improved", "mixed", full=False, cap=1),
    _line("async, rates / delay, M=1", "async", backward="mixed", full=False, slowed=220),
    _line("async M=D", "async", backward="mixed"),
    _line("pipedream-2bw M=D", "pipedream-2bw", reads="previous"),
    _line("cdp-v2 M=D", "cdp-v2", reads="early"),
    _line("spectrain M=D", "spectrain", "improved", "mixed", aim="entry"),
    _line("lookahead M=D", "lookahead", "improved", "mixed", aim="next"),
    _line("pipeoptim improved mixed M=D", "pipeoptim", "improved", "mixed"),
    _line("rehearse recompute M=D", "rehearse", "partial", "recompute"),
    _line("rehearse mixed M=D", "rehearse", "partial", "mixed"),
)
DRAWN = (
    "1f1b M=D",
    "rehearse mixed M=D",
    "pipeoptim improved mixed M=1",
    "cdp-v2 M=D",
    "pipeoptim improved mixed M=D",
    "lookahead M=D",
    "pipedream-2bw M=D",
    "pipedream M=1",
)


@dataclass(frozen=True, slots=True)
class Task:
    """Data, and how it is trained.

    Args:
        x: inputs, one row per example; numbers of characters where ``letters`` is not 0.
        y: classes.
        test: the last so many examples are never trained on.
        letters: size of the alphabet; inputs are then one-hot.
        classes: number of classes.
        rows: of a batch.
        updates: of a training.
        residual: whether layers add to their input.
    """

    x: Tensor
    y: Tensor
    test: int
    letters: int
    classes: int
    rows: int
    updates: int
    residual: bool

    @property
    def features(self) -> int:
        """What the first layer reads."""
        return self.x.shape[1] * max(1, self.letters)

    def encoded(self, x: Tensor) -> Tensor:
        """Inputs of the first layer."""
        return torch.nn.functional.one_hot(x, self.letters).flatten(-2).float() if self.letters else x

    def batch(self, t: int, seeds: int) -> tuple[Tensor, Tensor]:
        """The t-th batch of every seed, each in an order of its own."""
        per = (len(self.x) - self.test) // self.rows
        epoch, i = divmod(t, per)
        chosen = _orders(len(self.x) - self.test, epoch, seeds)[:, i * self.rows : (i + 1) * self.rows]
        return self.encoded(self.x[chosen]), self.y[chosen]

    def rate(self, optimizer: str, depth: int) -> float:
        """Learning rate: chosen by what exact training likes, for all rules alike."""
        if optimizer != "sgdm":
            return 1e-3
        return 0.05 if self.letters else 0.02 if depth <= 8 else 0.01


@functools.lru_cache(maxsize=1)
def _orders(count: int, epoch: int, seeds: int) -> Tensor:
    """An order of ``count`` examples for every seed."""
    draws = [torch.Generator().manual_seed(7919 * seed + epoch + 1) for seed in range(seeds)]
    return torch.stack([torch.randperm(count, generator=draw) for draw in draws])


def digits() -> Task:
    """8 x 8 pictures of digits from scikit-learn; a plain stack of linear layers and ReLU."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return Task(torch.tensor(x / 16.0).float()[order], torch.tensor(y)[order], 360, 0, 10, 32, 440, residual=False)


def text() -> Task:
    """The character behind eight others, in the source of Python's standard library; layers with a residual path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = ("argparse.py", "ast.py", "dataclasses.py", "functools.py", "inspect.py", "typing.py")
    source = "".join((folder / name).read_text() for name in files)
    kept = [c for c in source if c == "\n" or 32 <= ord(c) < 127]
    letters = sorted(set(kept))
    windows = torch.tensor([letters.index(c) for c in kept]).unfold(0, 9, 1)
    count = len(letters)
    return Task(windows[:, :8], windows[:, 8], 2000, count, count, 64, 400, residual=True)


TASKS = {"digits": digits, "text": text}


def train(task: Task, depth: int, optimizer: str, line: Line, seeds: int, updates: int) -> dict[str, Any]:
    """Train one line; accuracies and losses on the test part at `POINTS` places, for every seed."""
    shapes = [(task.features if k == 0 else WIDTH, task.classes if k == depth - 1 else WIDTH) for k in range(depth)]
    net = Net(tuple(shapes), task.residual)
    trial = Trial(net, Optimizer(optimizer, task.rate(optimizer, depth)), line.variant, net.start(seeds))
    places = {round(updates * (i + 1) / POINTS) for i in range(POINTS)}
    found: dict[str, Any] = {"updates": sorted(places), "accuracy": [], "loss": [], "train": []}
    losses = []
    with torch.no_grad():
        for t in range(updates):
            losses.append(trial.update(*task.batch(t, seeds)))
            if t + 1 in places:
                for name, values in zip(("accuracy", "loss"), tested(task, trial, seeds), strict=True):
                    found[name].append(values)
                found["train"].append(torch.stack(losses).mean(0).tolist())
                losses = []
    return found


def tested(task: Task, trial: Trial, seeds: int) -> tuple[list[float], list[float]]:
    """Accuracy in per cent and mean loss on the test part, for every seed."""
    x, y = task.encoded(task.x[-task.test :]).expand(seeds, -1, -1), task.y[-task.test :].expand(seeds, -1)
    for k, weight in enumerate(trial.weights()):
        x = trial.net.forward(k, weight, x)[0]
    losses = -torch.log_softmax(x, -1).gather(2, y[..., None]).mean((1, 2))
    return (100 * (x.argmax(-1) == y).float().mean(1)).tolist(), losses.tolist()


def cost(line: Line, depth: int) -> tuple[int, float]:
    """Most weight versions that a stage holds, and micro-batches per slot of the simulator: 1 is a full pipeline.

    All stages take equally long, a backward twice as long as a forward; messages take no time.
    """
    parts = depth if line.variant.full or line.rule == "1f1b" else 1
    forward = 3e-3 / parts
    stages = tuple(
        StagePlan(
            workers=(f"w{k}",),
            segments=(f"op{k}",),
            forward_s=forward,
            backward_s=2 * forward,
            weights_s=0.0,
            update_s=0.0,
            parameter_bytes=1,
            tape_bytes=1,
            owed_bytes=0,
        )
        for k in range(depth)
    )
    edges = tuple(
        EdgePlan(source=k, target=k + 1, slots=2, forward_bytes=0, backward_bytes=0, gradient=True)
        for k in range(depth - 1)
    )
    workers = tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(depth))
    predictor = line.predictor if rule_named(line.rule).predicts else NO_PREDICTOR
    plan = Plan(
        format=FORMAT, model="none", rule=line.rule, layout="pipeline", predictor=predictor, recompute=(),
        backward=line.backward, compile=False, precision="fp32", loss_scale=NO_SCALE,
        clip=NO_CLIP, ema=0.0, deterministic=False, replicas=1, micro_batches=parts,
        mesh={}, parameters={}, outputs={}, states={}, shards=0,
        sharded=(),
        transport="memory", deadline_s=1.0, latency_s=0.0,
        bytes_per_s=1e12, instruction_s=0.0, read_s=0.0, input_bytes=0,
        workers=workers, stages=stages, edges=edges, exchanges=(),
    )  # fmt: skip
    few, many = (simulate(plan, emit(read(plan)), stream([parts] * n)) for n in (2 * depth, 4 * depth))
    share = 2 * depth * 9e-3 / (many.makespan_s - few.makespan_s)
    return max(worker.versions_held_peak for worker in many.workers), share


def cell(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    if any(math.isnan(value) for value in values):
        return "diverged"
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def within(values: Sequence[float], exact: Sequence[float]) -> bool:
    """Whether a mean is not below that of exact training by more than twice the standard error of the difference."""
    error = math.sqrt((statistics.variance(values) + statistics.variance(exact)) / len(values))
    return statistics.fmean(exact) - statistics.fmean(values) <= 2 * error


def tables(done: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """One table per task: final accuracy, bold where it is within the noise of exact training."""
    parts = []
    costs = {(line.variant.name, depth): cost(line, depth) for line in LINES for depth in DEPTHS}
    base = {depth: costs[LINES[0].variant.name, depth][1] for depth in DEPTHS}
    for task in TASKS:
        columns = ["rule", *(f"{o}, D={d}" for d in DEPTHS for o in OPTIMIZERS)]
        columns += [f"{what}, D={d}" for d in DEPTHS for what in ("versions", "x 1f1b")]
        rows = []
        for line in LINES:
            row = [line.variant.name]
            for depth in DEPTHS:
                for optimizer in OPTIMIZERS:
                    exact = done.get((task, depth, optimizer, LINES[0].variant.name))
                    mine = done.get((task, depth, optimizer, line.variant.name))
                    if mine is None or exact is None:
                        row.append("")
                        continue
                    values = mine["accuracy"][-1] if all(map(math.isfinite, mine["loss"][-1])) else [math.nan]
                    near = not math.isnan(values[0]) and within(values, exact["accuracy"][-1])
                    row.append(f"**{cell(values)}**" if near else cell(values))
            for depth in DEPTHS:
                held, share = costs[line.variant.name, depth]
                row += [str(held), f"{share / base[depth]:.2f}"]
            rows.append(row)
        parts.append(f"### {task}\n\n" + table(columns, rows))
    return "\n\n".join(parts)


def draw(done: dict[tuple[Any, ...], dict[str, Any]], path: Path) -> None:
    """Test losses over updates: a row of panels for each task and depth, a column for each optimizer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [(task, depth) for task in TASKS for depth in DEPTHS]
    figure, axes = plt.subplots(len(panels), len(OPTIMIZERS), figsize=(13, 3.2 * len(panels)), squeeze=False)
    for row, (task, depth) in zip(axes, panels, strict=True):
        for axis, optimizer in zip(row, OPTIMIZERS, strict=True):
            for name in DRAWN:
                found = done.get((task, depth, optimizer, name))
                if found is not None:
                    means = [statistics.fmean(values) for values in found["loss"]]
                    axis.plot(found["updates"], means, label=name, linewidth=2.5 if name == DRAWN[0] else 1.2)
            axis.set_title(f"{task}, D={depth}, {optimizer}", fontsize=9)
            axis.set_ylim(bottom=0 if task == "digits" else None, top=2.6 if task == "digits" else 3.6)
    axes[0][0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("updates")
    for row in axes:
        row[0].set_ylabel("test loss")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def _turn(one: tuple[Line, tuple[str, int, str]]) -> tuple[bool, bool, int, int]:
    """What is drawn is trained first, and AdamW, which says what Adam says, behind the others."""
    name, (_, depth, optimizer) = one[0].variant.name, one[1]
    place = DRAWN.index(name) if name in DRAWN else len(DRAWN)
    return place > 5, optimizer == "adamw", depth, place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl", help="results, a line of JSON for each run")
    parser.add_argument("--short", action="store_true", help="digits, depth 8, Adam, 100 updates; no results kept")
    parser.add_argument("--tables", action="store_true", help="train nothing: table and curves of what is there")
    parser.add_argument("--anyway", action="store_true", help="on a busy machine too, as always: no time is taken here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done: dict[tuple[Any, ...], dict[str, Any]] = {}
    if args.out.exists() and not args.short:
        for text_line in args.out.read_text().splitlines():
            made = json.loads(text_line)
            done[made["task"], made["depth"], made["optimizer"], made["rule"]] = made
    tasks = {name: make() for name, make in list(TASKS.items())[: 1 if args.short else None]}
    cells = [("digits", 8, "adam")] if args.short else list(itertools.product(TASKS, DEPTHS, OPTIMIZERS))
    for line, (name, depth, optimizer) in sorted(itertools.product(LINES, cells), key=_turn):
        key = name, depth, optimizer, line.variant.name
        if key in done or args.tables:
            continue
        began, task = time.perf_counter(), tasks[name]
        found = train(task, depth, optimizer, line, SEEDS, 100 if args.short else task.updates)
        done[key] = dict(zip(("task", "depth", "optimizer", "rule"), key, strict=True)) | found
        print(*key, cell(found["accuracy"][-1]), f"{time.perf_counter() - began:.0f} s", flush=True)
        if not args.short:
            with args.out.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
    print(tables(done))
    print(f"\n{machine()}; {SEEDS} seeds; {time.strftime('%Y-%m-%d')}")
    if not args.short:
        draw(done, HERE / "curves.png")


if __name__ == "__main__":
    main()
