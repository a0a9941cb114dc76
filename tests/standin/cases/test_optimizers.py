"""Optimizers that look at more than one parameter are refused, on devices as on the CPU.

They are tried in a forked child, which cannot use the devices of its parent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.errors import JobError
from tests.api.jobs import make, mlp


def clipping(named: Any) -> torch.optim.Optimizer:
    """Its steps clip by the norm of all gradients that the optimizer has."""
    made = torch.optim.AdamW(named, lr=1e-3)

    def clip(optimizer: Any, args: Any, options: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)

    made.register_step_pre_hook(clip)
    return made


def test_a_hook_that_clips_by_the_norm_of_all_is_refused_by_its_name() -> None:
    roundelay.train(make(mlp()), workers=2, rule="1f1b", steps=1, devices="cuda:0,cuda:0", check="off")
    with pytest.raises(JobError, match=r"AdamW with step pre hook `clip` at .*test_optimizers.py"):
        roundelay.train(make(mlp(), optimizer=clipping), workers=2, rule="1f1b", steps=2, devices="cuda:0,cuda:0")
