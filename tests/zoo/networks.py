"""Networks as papers have them, written as one writes plain PyTorch; only the sizes are small.

Sources: ResNet-18 (He et al. 2016, as torchvision lays it out), GoogLeNet with BatchNorm and an auxiliary head (Szegedy
et al. 2015), GNMT (Wu et al. 2016), residual recurrent layers (Kim et al. 2017).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .dense import class_loss
from .entry import Arguments, Batch, Entry, built_by, drawn_by

COLOURS = 3
CLASSES = 4
VOCABULARY = 23
WIDTH = 8
FEATURES = 5
PAD = 0
SIDES = (40, 33, 36)
LENGTHS = (4, 2, 3)


def _images(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randn(rows, COLOURS, length, length, generator=generator), labels


class BasicBlock(nn.Module):
    """Two convolutions around a shortcut, which is projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return rows x outputs x (height / stride) x (width / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        result: Tensor = self.relu(out)
        return result


class ResNet18(nn.Module):
    """Stem, four groups of two basic blocks, average, linear."""

    def __init__(self, base: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(COLOURS, base, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(base)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [base, base, 2 * base, 4 * base, 8 * base]
        for i in range(1, 5):
            first = BasicBlock(widths[i - 1], widths[i], 1 if i == 1 else 2)
            self.add_module(f"layer{i}", nn.Sequential(first, BasicBlock(widths[i], widths[i], 1)))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * base, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows x classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


class Conv(nn.Sequential):
    """Convolution, BatchNorm, ReLU in place."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs, eps=0.001), nn.ReLU(inplace=True))


class InceptionBlock(nn.Module):
    """Four branches side by side, concatenated."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1 = Conv(inputs, width, 1)
        self.branch2 = nn.Sequential(Conv(inputs, width // 2, 1), Conv(width // 2, width, 3))
        self.branch3 = nn.Sequential(Conv(inputs, width // 2, 1), Conv(width // 2, width // 2, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), Conv(inputs, width // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return rows x (3 * width) x height x width."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class InceptionOutputs(NamedTuple):
    """Logits of the main head and of the auxiliary one, both rows x classes."""

    logits: Tensor
    aux_logits: Tensor


class Inception(nn.Module):
    """Stem, three blocks of branches, and an auxiliary head after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(COLOURS, 4, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), Conv(4, 8, 3))
        self.block1 = InceptionBlock(8, 4)
        self.block2 = InceptionBlock(12, 4)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, CLASSES))
        self.block3 = InceptionBlock(12, 8)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, images: Tensor) -> InceptionOutputs:
        """Return the logits of both heads."""
        middle = self.block2(self.block1(self.stem(images)))
        deep = self.block3(self.pool(middle))
        pooled = functional.adaptive_avg_pool2d(deep, 1).flatten(1)
        return InceptionOutputs(self.fc(self.dropout(pooled)), self.aux(middle))


def _two_heads(outputs: InceptionOutputs, batch: tuple[Tensor, ...]) -> Tensor:
    return class_loss(outputs.logits, batch) + 0.3 * class_loss(outputs.aux_logits, batch)


def _sentences(generator: torch.Generator, rows: int, length: int) -> Batch:
    source = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    source[1, length - 1] = PAD
    shorter = 2 + length % 3  # another length than the source's, and another order of lengths
    target = torch.randint(1, VOCABULARY, (rows, shorter + 1), generator=generator)
    return {"source": source, "previous": target[:, :-1].contiguous(), "next": target[:, 1:].contiguous()}


def _both_sides(batch: dict[str, Tensor]) -> Arguments:
    return (batch["source"], batch["previous"]), {}


def _next_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), batch["next"].flatten())


class Attention(nn.Module):
    """Additive attention (Bahdanau et al. 2015) of every target position over the source."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, queries: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        """Return rows x target x width; `padding` is rows x source, True where there is no word."""
        scores = self.score(torch.tanh(self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1))).squeeze(-1)
        weights = scores.masked_fill(padding.unsqueeze(1), float("-inf")).softmax(-1)
        return torch.bmm(weights, memory)


class Gnmt(nn.Module):
    """Eight LSTM layers, four on either side, the first bidirectional, residual from the third on.

    The first decoder layer asks the attention; what it answers enters every later layer.
    """

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.target = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.encoder = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)])
        self.encoder.append(nn.LSTM(2 * WIDTH, WIDTH, batch_first=True))
        self.encoder.extend(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(layers - 2))
        self.attention = Attention()
        self.decoder = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True)])
        self.decoder.extend(nn.LSTM(2 * WIDTH, WIDTH, batch_first=True) for _ in range(layers - 1))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        """Return rows x target x vocabulary."""
        memory = self._encode(self.source(source))
        x, _ = self.decoder[0](self.dropout(self.target(previous)))
        context = self.attention(x, memory, source == PAD)
        for i, layer in enumerate(self.decoder[1:], 1):
            made, _ = layer(self.dropout(torch.cat([x, context], -1)))
            x = made + x if i > 1 else made
        out: Tensor = self.head(x)
        return out

    def _encode(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.encoder):
            made, _ = layer(self.dropout(x))
            x = made + x if i > 1 else made
        return x


def _reviews(generator: torch.Generator, rows: int, length: int) -> Batch:
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator), labels


class ResidualLstm(nn.Module):
    """Eight LSTM layers, each added to what it reads; the mean over all steps is classified."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return rows x classes."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + self.dropout(layer(x)[0])
        out: Tensor = self.head(x.mean(1))
        return out


def _described(generator: torch.Generator, rows: int, length: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=generator)
    features = torch.randn(rows, FEATURES, generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "features": features, "next": tokens[:, 1:].contiguous()}


def _by_keyword(batch: dict[str, Tensor]) -> Arguments:
    return (batch["tokens"],), {"features": batch["features"]}


class TwoInputsTied(nn.Module):
    """A transformer over words that is told features of each row; the embedding is the head, too."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.features = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, features: Tensor) -> Tensor:
        """Return rows x length x vocabulary."""
        told = self.features(features).unsqueeze(1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        hidden = self.encoder(self.embedding(tokens) + told, mask=mask, is_causal=True)
        out: Tensor = self.head(hidden * (1 + told))
        return out


ENTRIES = (
    Entry("resnet18", built_by(ResNet18), drawn_by(_images, SIDES), class_loss, draws=False, buffers=True, varies=True),
    Entry("inception", built_by(Inception), drawn_by(_images, SIDES), _two_heads, buffers=True, varies=True),
    Entry(
        "gnmt", built_by(Gnmt), drawn_by(_sentences, LENGTHS), _next_loss, _both_sides, varies=True, specialises=True
    ),
    Entry(
        "residual_lstm", built_by(ResidualLstm), drawn_by(_reviews, LENGTHS), class_loss, varies=True, specialises=True
    ),
    Entry(
        "two_inputs_tied",
        built_by(TwoInputsTied),
        drawn_by(_described, LENGTHS),
        _next_loss,
        _by_keyword,
        tied=True,
        varies=True,
    ),
)
