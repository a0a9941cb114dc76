"""AlexNet, VGG-16 and a residual LSTM, as PipeOptim (2023) trains them."""

from __future__ import annotations

from torch import Tensor, nn

CONVOLUTIONS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""VGG-16: width and number of the convolutions in each stretch; each ends with a pooling."""


def head(inputs: int, width: int, classes: int) -> list[nn.Module]:
    """Three linear layers with dropout between them."""
    return [
        nn.Flatten(),
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(width, classes),
    ]


def alexnet(classes: int) -> nn.Module:
    """Images (rows, 3, 224, 224) to logits (rows, classes); the one-column form (Krizhevsky, 2014)."""

    def convolution(inputs: int, outputs: int, size: int, stride: int, padding: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, size, stride, padding), nn.ReLU()]

    return nn.Sequential(
        *convolution(3, 64, 11, 4, 2),
        nn.MaxPool2d(3, 2),
        *convolution(64, 192, 5, 1, 2),
        nn.MaxPool2d(3, 2),
        *convolution(192, 384, 3, 1, 1),
        *convolution(384, 256, 3, 1, 1),
        *convolution(256, 256, 3, 1, 1),
        nn.MaxPool2d(3, 2),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, classes),
    )


def vgg16(classes: int, *, small: bool = False) -> nn.Module:
    """Images (rows, 3, 224, 224), or small ones (rows, 3, 32, 32), to logits (rows, classes)."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in CONVOLUTIONS:
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    made = nn.Sequential(*layers, *head(inputs if small else inputs * 7 * 7, 512 if small else 4096, classes))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return made


class ResidualLSTM(nn.Module):
    """Recurrent layers with a way past each, over numbered words; the last state decides (Kim et al., 2017)."""

    def __init__(self, vocabulary: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """(rows, length) to logits (rows, classes)."""
        x = self.words(words)
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x[:, -1])
        return logits
