"""GPT-2 of 124 million weights, random at first, on 4 rows of 256 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from roundelay import Job

VOCABULARY = 50257


def made(layers: int, rows: int, length: int) -> Job:
    """A job for a GPT-2 of so many layers, on a few batches of random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, use_cache=False, vocab_size=VOCABULARY)
    draws = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(VOCABULARY, (rows, length), generator=draws)} for _ in range(8)]
    return Job(
        model=GPT2LMHeadModel(config),
        loss=own_loss,
        batches=lambda epoch: batches,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-4),
        inputs=lambda batch: ((batch["input_ids"],), {"labels": batch["input_ids"]}),
    )


def own_loss(outputs: Any, batch: Any) -> Tensor:
    """The loss that the model computes itself."""
    loss: Tensor = outputs.loss
    return loss


def job(seed: int) -> Job:
    """12 layers."""
    return made(12, 4, 256)
