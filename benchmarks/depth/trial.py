"""Update rules on a stack of linear layers, all seeds at once and a batch at a time.

Roundelay itself runs one micro-batch after the other, which for the runs of this comparison would take days on two
cores. Here the micro-batches of a batch that read the same weights go through a layer together, and the seeds of a rule
are one dimension of every tensor. What is computed is the same: ``tests/benchmarks/test_depth.py`` holds each rule to a
training by Roundelay from the same weights and batches.

One stage is one layer. Weights are ``(seeds, inputs + 1, outputs)``, the last row the bias; activations are ``(seeds,
rows, features)`` with the rows of micro-batch i before those of i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BETA1, BETA2, EPS, MOMENTUM, DECAY = 0.9, 0.999, 1e-8, 0.9, 0.01
"""Torch's defaults, but for the momentum."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A rule as this comparison needs it.

    Args:
        name: of its line in the table.
        full: whether a batch is cut into D micro-batches; else it is one.
        reads: ``now`` W[t]; ``newest`` W[U]; ``previous`` W[t-1]; ``early`` W[t] where i + j > D, else W[t-1].
        predicts: setting of the predictor; none if empty.
        aim: whose moment's weights are predicted, as in ``UpdateRule.target``.
        backward: mode.
        cap: most updates that a prediction crosses.
        slowed: updates until which the learning rate of a stage is divided by a power, falling from 1 to 0, of its
            delay (PipeMare, technique 1); 0 for not at all.
    """

    name: str
    full: bool = True
    reads: Literal["now", "newest", "previous", "early"] = "newest"
    predicts: Literal["", "improved", "paper", "partial"] = ""
    aim: Literal["backward", "entry", "next"] = "backward"
    backward: Literal["stash", "mixed", "recompute"] = "stash"
    cap: int = 1_000_000
    slowed: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """One layer's weights and optimizer state after ``updates`` updates."""

    weight: Tensor
    first: Tensor
    second: Tensor
    updates: int


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``sgdm``, ``adam`` or ``adamw``, as pure functions of a `State`."""

    kind: str
    rate: float

    @property
    def decay(self) -> float:
        """Decoupled weight decay."""
        return DECAY if self.kind == "adamw" else 0.0

    def step(self, state: State, gradient: Tensor, slower: float = 1.0) -> State:
        """One update; a gradient with one dimension more in front gives as many states at once."""
        rate, u = self.rate / slower, state.updates + 1
        if self.kind == "sgdm":
            first = state.first * MOMENTUM + gradient
            return State(state.weight - rate * first, first, state.second, u)
        first = torch.lerp(state.first.expand_as(gradient), gradient, 1 - BETA1)
        second = state.second * BETA2 + (1 - BETA2) * gradient * gradient
        root = (second / (1 - BETA2**u)).sqrt_().add_(EPS)
        weight = state.weight * (1 - rate * self.decay) - first / root * (rate / (1 - BETA1**u))
        return State(weight, first, second, u)

    def predict(self, state: State, s: int, setting: str) -> Tensor:
        """The weights s updates on, by ``improved`` or ``paper``."""
        if s == 0 or state.updates == 0:
            return state.weight
        linear = setting == "paper"
        if self.kind == "sgdm":
            return state.weight - self.rate * (s if linear else sum(MOMENTUM**i for i in range(1, s + 1))) * state.first
        a, b, u = 1.0, 0.0, state.updates
        for i in range(1, s + 1):
            a, b = a * (1 - self.rate * self.decay), b * (1 - self.rate * self.decay)
            b += self.rate * BETA1**i / (1 - BETA1 ** (u + i))
        if linear:
            a, b = 1 - s * self.rate * self.decay, s * self.rate / (1 - BETA1**u)
        return state.weight * a - state.first / (state.second / (1 - BETA2**u)).sqrt_().add_(EPS) * b


@dataclass(frozen=True, slots=True)
class Net:
    """A stack of linear layers, ReLU between them.

    Args:
        shapes: (inputs, outputs) of every layer.
        residual: every layer between the first and the last adds ReLU(linear(layer norm of x)) to x.
    """

    shapes: tuple[tuple[int, int], ...]
    residual: bool

    def forward(self, k: int, weight: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Layer k, and its tape; ``weight`` may have a dimension more, as many as parts of ``x``."""
        last, inside = k == len(self.shapes) - 1, self.residual and k > 0
        norm = torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5) if inside else (x,)
        y = _linear(norm[0], weight)
        y = y if last else y.relu_()
        return (x + y if inside and not last else y), (x, *norm, y)

    def backward(self, k: int, weight: Tensor, tape: tuple[Tensor, ...], d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of layer k's input and of its linear map's output, and that map's input."""
        last, inside = k == len(self.shapes) - 1, self.residual and k > 0
        x, *norm, y = tape
        dz = d if last else d * (y > 0)
        dx = _linear_back(dz, weight)
        if inside:
            of_norm = torch.ops.aten.native_layer_norm_backward
            dx = of_norm(dx, x, x.shape[-1:], norm[1], norm[2], None, None, [True, False, False])[0]
            dx = dx if last else dx + d
        return dx, dz, norm[0]

    def start(self, seeds: int, kind: torch.dtype = torch.float32) -> list[Tensor]:
        """First weights: uniform with He's bound before a plain ReLU, 1 / sqrt(inputs) elsewhere; no bias."""
        made = []
        for k, (inputs, outputs) in enumerate(self.shapes):
            plain = not self.residual and k < len(self.shapes) - 1
            bound = math.sqrt((6 if plain else 1) / inputs)
            draws = [torch.Generator().manual_seed(1000 * seed + k) for seed in range(seeds)]
            each = [(torch.rand(inputs, outputs, generator=draw) * 2 - 1) * bound for draw in draws]
            made.append(torch.stack([torch.cat([w, torch.zeros(1, outputs)]) for w in each]).to(kind))
        return made


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 3:
        return torch.baddbmm(weight[:, -1:], x, weight[:, :-1])
    parts, seeds = weight.shape[:2]
    own = weight.transpose(0, 1)
    y = x.reshape(seeds, parts, -1, x.shape[-1]) @ own[:, :, :-1] + own[:, :, -1:]
    return y.reshape(seeds, -1, y.shape[-1])


def _linear_back(dz: Tensor, weight: Tensor) -> Tensor:
    if weight.dim() == 3:
        return torch.bmm(dz, weight[:, :-1].transpose(1, 2))
    parts, seeds = weight.shape[:2]
    dx = dz.reshape(seeds, parts, -1, dz.shape[-1]) @ weight.transpose(0, 1)[:, :, :-1].transpose(2, 3)
    return dx.reshape(seeds, -1, dx.shape[-1])


Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Number of an update to inputs (seeds, rows, features) and classes (seeds, rows)."""


class Trial:
    """One rule in training, all seeds at once."""

    def __init__(self, net: Net, optimizer: Optimizer, variant: Variant, weights: list[Tensor]) -> None:
        self.net, self.optimizer, self.variant = net, optimizer, variant
        self.size = len(net.shapes)
        self.parts = self.size if variant.full else 1
        zero = [State(w, torch.zeros_like(w), torch.zeros_like(w), 0) for w in weights]
        self.versions: dict[int, list[State]] = {0: zero}
        self.sums: list[Tensor] = []  # of each layer's last batch: gradients summed so far, micro-batch by micro-batch
        self.t = 0

    def weights(self) -> list[Tensor]:
        """The newest."""
        return [state.weight for state in self.versions[self.t]]

    def update(self, x: Tensor, classes: Tensor) -> Tensor:
        """Train on one batch; returns the mean loss of every seed."""
        reads: list[list[tuple[slice, Tensor]]] = []
        tapes: list[list[tuple[Tensor, ...]]] = []
        inputs = []
        for k in range(self.size):
            groups = list(self._groups(k, x.shape[1]))
            made = [self.net.forward(k, weight, x[:, rows]) for rows, weight in groups]
            reads.append(groups)
            tapes.append([tape for _, tape in made])
            inputs.append(x)
            x = _joined([y for y, _ in made])
        logs = torch.log_softmax(x, -1)
        losses = -logs.gather(2, classes[..., None]).mean((1, 2))
        d = logs.exp_().scatter_add_(2, classes[..., None], torch.full_like(logs[..., :1], -1)) / x.shape[1]
        self._down(reads, tapes, inputs, d)
        return losses

    def _groups(self, k: int, rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of the batch that read the same weights on layer k, and those weights; rows in order."""
        v, each, lag = self.variant, rows // self.parts, self.size - 1 - k
        now = self.versions[self.t]
        stale = min(lag, self.parts) if self.t and v.reads != "now" else 0
        if self.t and v.reads in ("previous", "early"):
            stale = self.parts if v.reads == "previous" else self.parts - 1 - k
        if stale:
            crossed = 1 if v.full else min(self.t, lag)
            state = self.versions[self.t - crossed][k]
            if v.predicts == "partial":
                done = self.parts - lag  # of the unfinished batch, when the first of them runs; one more for each
                yield slice(0, stale * each), self._partly(k, state, range(done, done + stale))
            elif v.aim == "entry":
                for i in range(stale):
                    yield slice(i * each, i * each + each), self._ahead(state, crossed + (i + k // 2) // self.parts)
            else:
                yield slice(0, stale * each), self._ahead(state, 1 if v.aim == "next" else crossed, lag)
        if stale < self.parts and v.aim == "entry":
            for i in range(stale, self.parts):
                yield slice(i * each, i * each + each), self._ahead(now[k], (i + k // 2) // self.parts)
        elif stale < self.parts:
            yield slice(stale * each, rows), self._ahead(now[k], 1) if v.aim == "next" else now[k].weight

    def _ahead(self, state: State, s: int, lag: int = 0) -> Tensor:
        v = self.variant
        if not v.predicts:
            return state.weight
        return self.optimizer.predict(state, min(v.cap, lag if v.predicts == "paper" else s), v.predicts)

    def _partly(self, k: int, state: State, done: range) -> Tensor:
        """(micro-batches, ...) predictions: the update with the mean gradient of the first ``done`` micro-batches."""
        counts = torch.tensor(list(done), dtype=state.weight.dtype).view(-1, 1, 1, 1)
        first = max(1, done.start)
        means = self.sums[k][first - 1 : done.stop - 1] * (self.parts / counts[first - done.start :])
        made = self.optimizer.step(state, means).weight
        if done.start:
            return made
        return torch.cat([self.optimizer.predict(state, 1, "improved")[None], made])

    def _down(
        self,
        reads: list[list[tuple[slice, Tensor]]],
        tapes: list[list[tuple[Tensor, ...]]],
        inputs: list[Tensor],
        d: Tensor,
    ) -> None:
        """All backwards, and the update."""
        now, made, sums = self.versions[self.t], [], []
        for k in reversed(range(self.size)):
            groups = reads[k]
            if self.variant.backward != "stash":
                groups = self._live(k, d.shape[1])
                tape = [tuple(_joined(list(parts)) for parts in zip(*tapes[k], strict=True))]
                again = self.variant.backward == "recompute"
                tapes[k] = [
                    self.net.forward(k, weight, inputs[k][:, rows])[1] if again else _cut(tape[0], rows)
                    for rows, weight in groups
                ]
            back = [self.net.backward(k, w, tape, d[:, rows]) for (rows, w), tape in zip(groups, tapes[k], strict=True)]
            d, dz, h = (_joined([one[i] for one in back]) for i in range(3))
            gradient, running = self._gradient(h, dz)
            sums.append(running)
            made.append(self.optimizer.step(now[k], gradient, self._slower(k)))
        self.sums = sums[::-1]
        self.t += 1
        self.versions[self.t] = made[::-1]
        self.versions.pop(self.t - self.size - 1, None)

    def _live(self, k: int, rows: int) -> list[tuple[slice, Tensor]]:
        """What backwards read that do not read their forwards' weights."""
        v, state, each = self.variant, self.versions[self.t][k], rows // self.parts
        if v.aim == "entry":
            far = [(i + k // 2) // self.parts for i in range(self.parts)]
            return [(slice(i * each, i * each + each), self._ahead(state, s)) for i, s in enumerate(far)]
        return [(slice(0, rows), self._ahead(state, 1) if v.aim == "next" else state.weight)]

    def _gradient(self, h: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's gradient, and for ``partial`` the sums over the first micro-batches, (micro-batches, ...)."""
        if self.variant.predicts != "partial":
            return torch.cat([h.transpose(1, 2) @ dz, dz.sum(1, keepdim=True)], 1), h
        seeds = h.shape[0]
        h = h.reshape(seeds, self.parts, -1, h.shape[-1]).transpose(0, 1)
        dz = dz.reshape(seeds, self.parts, -1, dz.shape[-1]).transpose(0, 1)
        running = torch.cat([h.transpose(2, 3) @ dz, dz.sum(2, keepdim=True)], 2).cumsum_(0)
        return running[-1], running[:-1]

    def _slower(self, k: int) -> float:
        if not self.variant.slowed:
            return 1.0
        power = max(0.0, 1.0 - self.t / self.variant.slowed)
        return float(max(1.0, (self.size - 1 - k) / self.parts) ** power)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _cut(tape: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
    return tuple(part[:, rows].contiguous() for part in tape)  # the layer norm's backward wants them so
