"""``--arithmetic``: let all machines of a run compute with the same instructions, so that their bits agree.

It is chosen before torch is loaded, which reads it once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from roundelay.env import put_all
from roundelay.errors import UsageError, did_you_mean

CHOICES = {
    "sse": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_CBWR": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
"""Name to what torch and its libraries read from the environment."""

Arithmetic = Annotated[
    str | None,
    typer.Option(
        help="Instructions with which torch computes, the same on all machines of a run: sse, avx2 or avx512. "
        "[default: the best of this machine]",
        metavar="sse|avx2|avx512",
        show_default=False,
    ),
]


def choose_arithmetic(name: str | None) -> None:
    """Let torch compute with these instructions; None leaves it as it is.

    Raises:
        UsageError: the name is unknown, or torch is loaded already and computes with others.
    """
    if name is None:
        return
    if name not in CHOICES:
        remedy = did_you_mean(name, CHOICES) + "Choose one of these."
        raise UsageError("--arithmetic", got=repr(name), expected=" or ".join(CHOICES), remedy=remedy)
    if put_all(CHOICES[name]) and "torch" in sys.modules:
        raise UsageError(
            "--arithmetic",
            got=f"{name} after torch was loaded",
            expected="the choice before",
            remedy=f"Set ATEN_CPU_CAPABILITY={name} before Python starts.",
        )
