"""What PipeOptim (2023) printed: Tables II, IV, V, VI and the text to Figures 5 and 6. No number here is ours."""

from __future__ import annotations

GPIPE, PIPEDREAM, TWO_BW, SPECTRAIN, PIPEOPTIM = "GPipe", "PipeDream", "PipeDream-2BW", "SpecTrain", "PipeOptim"
TITLES = (GPIPE, PIPEDREAM, TWO_BW, SPECTRAIN, PIPEOPTIM)

WEIGHTS_MEMORY = {
    PIPEDREAM: "[M, D·M]",
    TWO_BW: "2 M",
    SPECTRAIN: "2 M",
    PIPEOPTIM: "[M, 2 M]",
}
"""Table II: what the weights of a stage take, M being one version of them."""


def _row(*values: str | None) -> dict[str, str]:
    return {title: value for title, value in zip(TITLES, values, strict=True) if value is not None}


ACCURACY = {
    "SGDM, AlexNet, Tiny-ImageNet": _row("51.93", "43.99", "47.96", "50.14", "49.23"),
    "SGDM, ResNet-101, Tiny-ImageNet": _row("66.64", "67.72", "66.94", "67.81", "67.84"),
    "SGDM, Inception-V3, Tiny-ImageNet": _row("56.56", "56.88", "54.25", "57.13", "57.37"),
    "AdamW, Residual LSTM, IMDb": _row("85.65", "84.82", "86.15", None, "86.38"),
    "AdamW, VGG-16, CIFAR-100": _row("67.05", "66.61", "66.92", None, "67.91"),
    "AdamW, GoogleNet, CIFAR-100": _row("73.91", "74.58", "74.73", None, "74.73"),
    "Adam, Residual LSTM, IMDb": _row("85.64", "85.52", "84.88", None, "85.52"),
    "Adam, GNMT-8, WMT-16": _row("21.22", "21.04", "21.20", None, "21.29"),
}
"""Table IV: highest accuracy in per cent, or BLEU; SpecTrain is given for SGDM only."""

LARGEST_BATCH = {
    "ResNet-101, SGDM": _row("86", "86", "86", "90", "86"),
    "GNMT-8, Adam": _row("130", "136", "140", None, "142"),
    "GNMT-16, Adam": _row("124", "116", "120", None, "120"),
}
"""Table V: rows of the largest mini-batch per GPU; GPipe's is a quarter of its mini-batch."""

OVERALL = {
    "ResNet-101": {
        PIPEDREAM: "66.62 / 86.39, 13.47 h",
        TWO_BW: "65.39 / 85.71, 17.67 h",
        SPECTRAIN: "66.19 / 86.33, 16.77 h",
        PIPEOPTIM: "66.69 / 86.57, 12.91 h",
    },
    "Inception-V3": {
        PIPEDREAM: "55.74 / 78.91, 8.57 h",
        TWO_BW: "50.90 / 75.14, > 12.91 h",
        SPECTRAIN: "55.57 / 78.63, 8.57 h",
        PIPEOPTIM: "55.91 / 79.48, 7.76 h",
    },
}
"""Table VI: highest top-1 / top-5 accuracy, and hours to a target accuracy (66.0 and 55.5 %)."""

FIGURE_5 = "PipeOptim over GPipe: 35 % on average, up to 43 %"
FIGURE_6 = "PipeOptim over GPipe: 35.3 % (ResNet-101), 47.3 to 50.5 % (GNMT)"
"""Sect. V-C: throughput with the same and with the largest batch. The text quotes no other numbers."""
