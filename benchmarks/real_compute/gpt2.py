"""A job: Hugging Face's GPT-2 with four layers of width 256, on batches of 4 x 256 random tokens."""

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import roundelay

TOKENS, LENGTH, ROWS = 8192, 256, 4


def job(seed: int) -> roundelay.Job:
    """Random weights and data."""
    config = GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, use_cache=False)
    data = [torch.randint(TOKENS, (ROWS, LENGTH)) for _ in range(20)]
    return roundelay.Job(
        model=GPT2LMHeadModel(config),
        loss=lambda outputs, batch: F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()),
        inputs=lambda batch: ((), {"input_ids": batch}),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
        steps=30,
    )
