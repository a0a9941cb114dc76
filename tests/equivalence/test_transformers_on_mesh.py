"""Models of the transformers library that nobody prepared, on two replicas of a mesh of two, vocabulary included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn
from torch.optim import AdamW

import roundelay
from roundelay.planning.physical_graph import physical_graph

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
    "one head of keys": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA | {"num_key_value_heads": 1})),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLAMA | {"num_key_value_heads": 4}, pad_token_id=0)),
    "phi3 of grouped heads": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LLAMA, pad_token_id=0)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=48
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**LLAMA, head_dim=8)),
    "falcon": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_kv_heads=2,
            new_decoder_architecture=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=WORDS,
            d_model=WIDTH,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, vocab_size=WORDS, max_position_embeddings=32)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=16, patch_size=8, num_labels=WORDS)),
}

SUMS = {"falcon": 2, "phi3 of grouped heads": 2, "t5": 12, "bart": 7, "vit": 2}
"""Sums of all hidden values in a forward: of an attention, an MLP, or both together in Falcon, and of a table."""

LEFT_WHOLE = {
    "gpt2": {"wpe"},
    "mixtral": {"gate"},
    "qwen2_moe": {"gate", "shared_expert_gate"},
    "one head of keys": {"k_proj", "v_proj"},
    "phi3 of grouped heads": {"qkv_proj", "o_proj"},
    "bart": {"embed_positions"},
    "bert": {"position_embeddings", "token_type_embeddings", "dense"},
    "vit": {"cls_token", "position_embeddings", "projection"},
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


def job_of(model: str) -> roundelay.Job:
    torch.manual_seed(0)
    data = batches(model, 2)
    return roundelay.Job(
        model=MODELS[model](),
        loss=lambda outputs, batch: outputs.loss,
        batches=lambda epoch: data,
        optimizer=lambda named: AdamW(named, lr=1e-3),
    )


@pytest.mark.parametrize("model", MODELS)
def test_it_is_split_and_computes_what_plain_pytorch_does(model: str) -> None:
    job = job_of(model)
    captured = roundelay.capture(job)
    plan = roundelay.plan(
        job, captured=captured, tensor_parallel=2, data_parallel=2, workers=1, rule="1f1b", cuts="roofline"
    )
    assert any("max" in str(phase) for exchange in plan.exchanges for phase in exchange.phases), "the scores are split"
    found = roundelay.verify(job, plan=plan, steps=2)
    assert found.equal, found.differences()
    assert found.fidelity is not None
    assert found.fidelity.gradients


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_it_is_proved_in_stages_on_replicas_of_a_mesh_with_parts_of_states_or_weights(model: str, zero: int) -> None:
    job = job_of(model)
    found = roundelay.verify(
        job, workers=2, data_parallel=2, tensor_parallel=2, zero=zero, rule="1f1b", cuts="equal", steps=2
    )
    assert found.equal, found.differences()
    assert found.fidelity is not None
    assert found.fidelity.mesh == f"2 replicas x 2 stages x tensor 2 x ZeRO {zero}"


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_exchanges_what_megatron_lm_s_does(model: str) -> None:
    job = job_of(model)
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, tensor_parallel=2, workers=1, rule="1f1b", cuts="roofline")
    graph = physical_graph(captured, plan)
    most = max(int(one["bytes"]) for one in graph.boxings)
    sums = [one for one in graph.boxings if one["bytes"] == most]
    back = [one for one in sums if "backward" in str(one["when"])]
    assert {(one["from"], one["to"]) for one in sums} == {("P", "B")}
    assert len(sums) == 2 * len(back) == 2 * SUMS.get(model, 3)
    whole = {name.removesuffix(".weight").rpartition(".")[2] for name in graph.left_whole}
    assert whole == LEFT_WHOLE.get(model, set()), graph.left_whole
