"""The networks of the checks, as jobs by name; `job_file.py` gives them to the command line."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay import Job

Data = list[tuple[Tensor, ...]]
CLASSES = 10


class Causal(nn.Module):
    """A small language model: embeddings, blocks of causal attention and a perceptron, logits of the next word."""

    def __init__(self, length: int, width: int = 64, words: int = 128, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.word(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))


class Block(nn.Module):
    """Attention, then a perceptron, each added to the stream."""

    def __init__(self, width: int, dropout: float = 0.0, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        drops = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=drops)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Vision(nn.Module):
    """A vision transformer: patches, blocks, the mean of the tokens."""

    def __init__(self, side: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Recurrent(nn.Module):
    """Embedding, two layers of LSTM, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.cells, self.head = nn.Embedding(50, 32), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.word(x))[0])


class HostRead(nn.Module):
    """Its forward reads a number of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h / h.norm().item())


class TooLarge(nn.Module):
    """One activation has so many copies of the rows."""

    def __init__(self, copies: int) -> None:
        super().__init__()
        self.copies, self.a, self.b = copies, nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b((h.unsqueeze(0).expand(self.copies, -1, -1) * 1.5).relu().mean(0))


class Gpt(nn.Module):
    """GPT-2 by hand, for machines without transformers: the output weights are those of the embedding."""

    def __init__(self, depth: int, width: int, length: int, words: int) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads=width // 64) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        stream = self.word(input_ids) + self.position(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            stream = block(stream)
        logits = functional.linear(self.norm(stream), self.word.weight)
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def class_loss(outputs: Tensor, batch: Any) -> Tensor:
    """Cross entropy of the last tensor of the batch, over rows or over words."""
    return functional.cross_entropy(outputs.flatten(0, -2), batch[-1].flatten())


def weighted_loss(outputs: Tensor, batch: Any) -> Tensor:
    """The same with weights that the loss makes itself."""
    return functional.cross_entropy(outputs, batch[-1], weight=torch.ones(CLASSES))


def contrastive_loss(outputs: Tensor, batch: Any) -> Tensor:
    """Every row is its own class."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(outputs.shape[0]))


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9)


def momentum_one_by_one(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.05, momentum=0.9, foreach=False)


def numbers(rows: int, *shape: int, classes: int = CLASSES, count: int = 4) -> Data:
    """Batches of random numbers with a class each."""
    draws = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, *shape, generator=draws), torch.randint(classes, (rows,), generator=draws))
        for _ in range(count)
    ]


def words(rows: int, length: int, known: int, count: int = 4) -> Data:
    """Batches of random words, each to be followed by a random word."""
    draws = torch.Generator().manual_seed(6)
    return [
        (torch.randint(known, (rows, length), generator=draws), torch.randint(known, (rows, length), generator=draws))
        for _ in range(count)
    ]


def _job(model: nn.Module, data: Data, loss: Any = class_loss, optimizer: Any = adamw) -> Job:
    return Job(model=model, loss=loss, batches=lambda epoch: data, optimizer=optimizer)


def _layers(dropout: float = 0.0, out: int = CLASSES) -> nn.Sequential:
    parts = [(nn.Linear(64, 64), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])) for _ in range(4)]
    return nn.Sequential(*(layer for part in parts for layer in part), nn.Linear(64, out))


def _convolutions() -> nn.Sequential:
    blocks = [(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 32), (32, 32))]
    layers = [layer for block in blocks for layer in block]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def _embedding() -> nn.Sequential:
    rest = (nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 50))
    return nn.Sequential(nn.Embedding(1000, 64), *rest)


def _attention(tiny: bool, dropout: float = 0.0) -> Job:
    length, rows = (32, 4) if tiny else (1024, 8)
    return _job(Causal(length, depth=2 if tiny else 4, dropout=dropout), words(rows, length, 128))


def _encoder(tiny: bool) -> Job:
    """torch's own encoder layer, which calls `view` on what attention returns."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))
    return _job(model, words(4 if tiny else 8, 24, 50))


def _resnet(tiny: bool) -> Job:
    models = importlib.import_module("torchvision").models
    return _job(models.resnet18(num_classes=CLASSES), numbers(16, 3, 64, 64), optimizer=momentum)


def _wide(tiny: bool) -> Job:
    width, rows, depth = (64, 32, 4) if tiny else (2048, 2048, 12)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return _job(nn.Sequential(*layers, nn.Linear(width, CLASSES)), numbers(rows, width))


def _wrong_label(tiny: bool) -> Job:
    """The seventh batch has a class that does not exist."""
    data = numbers(16, 64, count=20)
    data[6] = (data[6][0], data[6][1] + CLASSES)
    return _job(_layers(), data)


def _too_large(tiny: bool) -> Job:
    """More than the part of the device's memory that this process may use."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((200 << 20) / total)
    return _job(TooLarge(100_000), numbers(16, 64, count=20))


MAKERS: dict[str, Callable[[bool], Job]] = {
    "mlp": lambda tiny: _job(_layers(), numbers(16, 64)),
    "mlp on cpu and device": lambda tiny: _job(_layers(), numbers(16, 64), optimizer=momentum_one_by_one),
    "dropout": lambda tiny: _job(_layers(0.1), numbers(16, 64)),
    "cnn": lambda tiny: _job(_convolutions(), numbers(16, 3, 8 if tiny else 32, 8 if tiny else 32)),
    "lstm": lambda tiny: _job(Recurrent(), words(8, 12, 50)),
    "embedding": lambda tiny: _job(_embedding(), words(8, 64, 50)),
    "attention": _attention,
    "attention with dropout": lambda tiny: _attention(tiny, 0.1),
    "encoder": _encoder,
    "resnet18": _resnet,
    "wide": _wide,
    "host read": lambda tiny: _job(HostRead(), numbers(16, 64)),
    "loss makes weights": lambda tiny: _job(_layers(), numbers(16, 64), weighted_loss),
    "loss makes labels": lambda tiny: _job(_layers(out=16), numbers(16, 64), contrastive_loss),
    "wrong label": _wrong_label,
    "too large": _too_large,
}


def missing(name: str) -> str:
    """The package that a network needs and that is not there; empty if nothing is missing."""
    needs = {"resnet18": "torchvision", "zoo": "transformers"}.get(name)
    return needs if needs and importlib.util.find_spec(needs) is None else ""


def seed() -> None:
    """The same random numbers whatever was drawn before."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def made(name: str, tiny: bool) -> Job:
    """A fresh job, with the same weights every time."""
    seed()
    return MAKERS[name](tiny)


def endless(job: Job) -> Job:
    """The job with an epoch that never ends, as its end would be measured too."""

    def batches(epoch: int) -> Iterator[Any]:
        while True:
            yield from job.batches(epoch)

    return replace(job, batches=batches)


def gpt_job(depth: int, rows: int, length: int, width: int = 768, words: int = 50_257) -> Job:
    """GPT-2 with random weights, on random text; 124 million parameters at depth 12."""
    seed()

    def batches(epoch: int) -> Iterator[dict[str, Tensor]]:
        draws = torch.Generator().manual_seed(epoch)
        while True:
            text = torch.randint(words, (rows, length), generator=draws)
            yield {"input_ids": text, "labels": text}

    model: nn.Module
    if importlib.util.find_spec("transformers") is None:
        model = Gpt(depth, width, max(length, 1024), words)
    else:
        import transformers

        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_layer": depth, "n_embd": width, "n_head": width // 64, "vocab_size": words}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **drops))
    return Job(
        model=model.train(),
        loss=lambda outputs, batch: outputs["loss"],
        batches=batches,
        inputs=lambda batch: ((), batch),
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
    )


def vision_job(tiny: bool, rows: int) -> Job:
    """ViT-B of 16 x 16 patches on images of 224 x 224."""
    seed()
    side = 64 if tiny else 224
    model = Vision(side, 8 if tiny else 16, 128 if tiny else 768, 4 if tiny else 12, 4 if tiny else 12)
    data = numbers(rows, 3, side, side, count=2)
    return endless(_job(model, data, optimizer=momentum))
