"""A newcomer's job: a small model of Hugging Face, whose batches have labels, and a slow loader."""

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import roundelay


def job(seed: int) -> roundelay.Job:
    """30 batches, a tenth of a second each."""
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)

    def batches(epoch: int):  # type: ignore[no-untyped-def]
        for _ in range(30):
            time.sleep(0.1)
            ids = torch.randint(64, (8, 16))
            yield {"input_ids": ids, "labels": ids}

    return roundelay.Job(
        model=GPT2LMHeadModel(config),
        loss=lambda outputs, batch: outputs.loss,
        batches=batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4),
        steps=30,
    )
