"""A small GPT learns to write Python from Python's own standard library.

A complete job: model, loss, data, optimizer, schedule, evaluation, and a sample of what the model writes. Nothing is
fetched: the text is the source of the modules that came with the interpreter, read character by character. The model
is plain PyTorch and knows nothing of stages or workers; to train one of your own, change what `job` returns::

    roundelay train examples/char_gpt.py --workers 2
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay

STEPS = 500
"""Suggested number of updates: about two minutes on two cores, and the length of the learning-rate schedule."""

UPDATES_PER_EPOCH = 250
ROWS, CONTEXT = 16, 128  # windows per batch, characters per window
WIDTH, DEPTH, HEADS = 256, 4, 4
LEARNING_RATE, WARM_UP = 2e-3, 50

TRAINING_TEXT, HELD_OUT_TEXT = 4_000_000, 500_000  # characters at most
HELD_OUT_WINDOWS = 192

ALPHABET = "\ufffd\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""Line feed and printable ASCII; the first character stands for every other one."""


# The text -------------------------------------------------------------------------------------------------------------


def encode(text: str) -> Tensor:
    """Positions in `ALPHABET`, one per character, as uint8."""
    points = torch.frombuffer(bytearray(text, "utf-32-le"), dtype=torch.int32)
    printable = (points >= ord(" ")) & (points <= ord("~"))
    return torch.where(printable, points - ord(" ") + 2, points == ord("\n")).to(torch.uint8)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """The encoded text to train on and the one held out: every tenth module, so no module is in both."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    modules = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.exists()]
    held_out = "".join(modules[::10])
    training = "".join(module for i, module in enumerate(modules) if i % 10)
    return encode(training[:TRAINING_TEXT]), encode(held_out[:HELD_OUT_TEXT])


def windows(text: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """The windows of the text that begin at `starts`: inputs x and, one character on, targets y; both (rows, CONTEXT)."""
    places = starts[:, None] + torch.arange(CONTEXT)
    return {"x": text[places].long(), "y": text[places + 1].long()}


def batches(seed: int, epoch: int) -> Iterator[dict[str, Tensor]]:
    """One epoch: batches of random windows, the same ones for the same seed and epoch."""
    text, _ = texts()
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    for _ in range(UPDATES_PER_EPOCH):
        yield windows(text, torch.randint(len(text) - CONTEXT, (ROWS,), generator=generator))


def unigram_entropy() -> float:
    """Entropy of the training text's single characters, in nats: the loss of a model that ignores all context."""
    counts = torch.bincount(texts()[0])
    return float(torch.distributions.Categorical(counts / counts.sum()).entropy())


# The model ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, time, width of a head)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normalised copy of the stream and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Characters (batch, time) to the logits of the character after each (batch, time, alphabet)."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(len(ALPHABET), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1), device=x.device)
        return self.head(self.norm(self.blocks(self.character(x) + self.position(places))))
