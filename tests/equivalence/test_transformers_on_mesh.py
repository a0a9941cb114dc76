"""Models of the transformers library that nobody prepared, on two replicas of a mesh of two, vocabulary included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn
from torch.optim import AdamW

import roundelay

WORDS, WIDTH = 1026, 32
SMALL = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = SMALL | {"vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 32}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=WIDTH, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=4)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, vocab_size=WORDS, max_position_embeddings=32)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=WORDS)),
}


def batches(model: str, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        if model == "vit":
            labels = torch.randint(WORDS, (8,), generator=generator)
            made.append({"pixel_values": torch.randn(8, 3, 16, 16, generator=generator), "labels": labels})
        else:
            words = torch.randint(4, WORDS, (8, 12), generator=generator)
            made.append({"input_ids": words, "labels": words})
    return made


@pytest.mark.parametrize("model", MODELS)
def test_it_is_split_and_computes_what_plain_pytorch_does(model: str) -> None:
    torch.manual_seed(0)
    data = batches(model, 2)
    job = roundelay.Job(
        model=MODELS[model](),
        loss=lambda outputs, batch: outputs.loss,
        batches=lambda epoch: data,
        optimizer=lambda named: AdamW(named, lr=1e-3),
    )
    captured = roundelay.capture(job)
    plan = roundelay.plan(
        job, captured=captured, tensor_parallel=2, data_parallel=2, workers=1, rule="1f1b", cuts="roofline"
    )
    assert any("max" in str(phase) for exchange in plan.exchanges for phase in exchange.phases), "the scores are split"
    found = roundelay.verify(job, plan=plan, steps=2)
    assert found.equal, found.differences()
    assert found.fidelity is not None
    assert found.fidelity.gradients
