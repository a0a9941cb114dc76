"""What a plan may say of the loss scale."""

from __future__ import annotations

import pytest

from roundelay.errors import PlanError
from roundelay.ir.loss_scale import LossScale


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("none", LossScale(0.0, 0)),
        ("1", LossScale(1.0, 0)),
        ("1024", LossScale(1024.0, 0)),
        ("dynamic", LossScale(65536.0, 2000)),
        ("dynamic:256", LossScale(256.0, 2000)),
        ("dynamic:1099511627776:3", LossScale(2.0**40, 3)),
    ],
)
def test_what_it_says_is_read(text: str, scale: LossScale) -> None:
    assert LossScale.parse(text) == scale
    assert (scale.on, scale.dynamic) == (text != "none", text.startswith("dynamic"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "3",
        "1000",
        "1.0",
        "-2",
        "1e3",
        str(2**41),
        "dynamic:",
        "dynamic:0",
        "dynamic:3",
        "dynamic:2:0",
        "dynamic:2:3:4",
        "dynamical",
        "1024:3",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=f"loss_scale of the plan: got '{text}'"):
        LossScale.parse(text)
