"""A small GPT learns to write Python from Python's own standard library.

A complete job: model, loss, data, optimizer, schedule, evaluation, and a sample of what the model writes. Nothing is
fetched: the text is the source of the modules that came with the interpreter, read character by character. The model
is plain PyTorch and knows nothing of stages or workers. To train one of your own, change what `job` returns.

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
from torch.optim.lr_scheduler import LambdaLR

import roundelay

STEPS = 400
"""Suggested number of updates, and the length of the learning-rate schedule: about two minutes on two cores."""

WIDTH, DEPTH, HEADS = 256, 4, 4  # 3.2 million parameters
CONTEXT = 64  # characters that the model sees
ROWS = 24  # windows of text in a batch
EPOCH = 200  # updates in an epoch

LEARNING_RATE, WEIGHT_DECAY, BETAS = 1.5e-3, 0.1, (0.9, 0.95)
WARM_UP = 50  # updates
LAST_RATE = 0.1  # of the learning rate, reached after STEPS updates and kept from there

TRAINING_TEXT, HELD_OUT_TEXT = 4_000_000, 500_000  # characters, at most
HELD_OUT_WINDOWS = 384

ALPHABET = "\ufffd\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""Line feed and printable ASCII; the first character stands for every other one."""


# The text -------------------------------------------------------------------------------------------------------------


def encode(text: str) -> Tensor:
    """Positions in `ALPHABET`, one for each character, as uint8."""
    points = torch.frombuffer(bytearray(text, "utf-32-le"), dtype=torch.int32)
    printable = (points >= ord(" ")) & (points <= ord("~"))
    return torch.where(printable, points - ord(" ") + 2, points == ord("\n")).to(torch.uint8)


@cache
def texts() -> tuple[Tensor, Tensor]:
    """The text to train on and the text held out, encoded: every tenth module is held out, whole."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    modules = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.exists()]
    training = "".join(module for i, module in enumerate(modules) if i % 10)
    held_out = "".join(modules[::10])
    return encode(training[:TRAINING_TEXT]), encode(held_out[:HELD_OUT_TEXT])


def windows(text: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """The windows of `text` that begin at `starts`: inputs x and, one character on, targets y, both (rows, CONTEXT)."""
    places = starts[:, None] + torch.arange(CONTEXT)
    return {"x": text[places].long(), "y": text[places + 1].long()}


def batches(seed: int, epoch: int) -> Iterator[dict[str, Tensor]]:
    """One epoch: batches of random windows, the same ones for the same seed and epoch."""
    text, _ = texts()
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    for _ in range(EPOCH):
        yield windows(text, torch.randint(len(text) - CONTEXT, (ROWS,), generator=generator))


def unigram_entropy() -> float:
    """Entropy of the training text's single characters in nats: the loss of a model that sees no context at all."""
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
        y: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(-2))
        return y


class Block(nn.Module):
    """Attention, then a perceptron: each reads the normalised stream and adds to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Characters (batch, time) in, logits of the character that follows each (batch, time, alphabet) out."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(len(ALPHABET), WIDTH)
        self.position = nn.Embedding.from_pretrained(waves(), freeze=False)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.size(1), device=x.device)
        stream = self.character(x) + self.position(places)
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def waves() -> Tensor:
    """Sines and cosines of each position (CONTEXT, WIDTH): from such a start attention finds near characters sooner."""
    angles = torch.arange(CONTEXT)[:, None] * 10_000 ** -torch.linspace(0, 1, WIDTH // 2)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def cross_entropy(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean over all characters, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


# Training it ----------------------------------------------------------------------------------------------------------


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW; only the matrices of linear layers decay, not embeddings, norms and biases."""

    def decays(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim == 2 and not name.startswith(("character.", "position."))

    groups = [
        {"params": [p for name, p in named if decays(name, p)], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in named if not decays(name, p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """A linear warm-up, then half a cosine down to `LAST_RATE`."""

    def factor(update: int) -> float:
        if update < WARM_UP:
            return (update + 1) / WARM_UP
        done = min(1.0, (update - WARM_UP) / (STEPS - WARM_UP))
        return LAST_RATE + (1.0 - LAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Mean loss over windows spread evenly over the held-out text, in nats and in bits per character."""
    _, text = texts()
    starts = torch.linspace(0, len(text) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
    parts = [windows(text, some) for some in starts.split(64)]
    loss = sum(float(cross_entropy(model(part["x"]), part)) * len(part["x"]) for part in parts) / len(starts)
    return {"held_out_loss": loss, "held_out_bits_per_char": loss / math.log(2.0), "unigram_entropy": unigram_entropy()}


@torch.no_grad()
def showcase(model: nn.Module, *, prompt: str = "def ", length: int = 400, seed: int = 0) -> str:
    """The prompt and `length` more characters that the model draws, at temperature 0.8; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    written = encode(prompt).long()
    for _ in range(length):
        logits = model(written[None, -CONTEXT:])[0, -1]
        drawn = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        written = torch.cat((written, drawn))
    return "".join(ALPHABET[i] for i in written)


def job(seed: int) -> roundelay.Job:
    """The job. Roundelay has seeded torch, numpy and random with `seed`, so the model starts the same every time."""
    return roundelay.Job(
        model=GPT(),
        loss=cross_entropy,
        batches=lambda epoch: batches(seed, epoch),
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=optimizer,
        scheduler=scheduler,
        evaluate=evaluate,
        showcase=showcase,
        steps=STEPS,
    )
