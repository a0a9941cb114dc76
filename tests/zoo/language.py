"""Unmodified models of the transformers library: random weights, `labels` in the call, the loss taken from the outputs.

`use_cache` keeps its default, so that outputs hold cache objects as they do for a person who changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from .entry import Batch, Entry, built_by, drawn_by

VOCABULARY = 37
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD = 3
LENGTHS = (8, 5, 7)
CLASSES = 3


def _words(generator: torch.Generator, rows: int, length: int) -> Tensor:
    """Return `rows` x `length` token ids without any of the special ones."""
    return torch.randint(FIRST_WORD, VOCABULARY, (rows, length), generator=generator)


def _own_loss(outputs: Any, batch: Batch) -> Tensor:
    """Return the loss that the model computed from the labels in its call."""
    loss: Tensor = outputs.loss
    return loss


def _causal(generator: torch.Generator, rows: int, length: int) -> Batch:
    words = _words(generator, rows, length)
    return {"input_ids": words, "labels": words.clone()}


def _padded(generator: torch.Generator, rows: int, length: int) -> Batch:
    words = _words(generator, rows, length)
    kept = torch.randint(2, length + 1, (rows, 1), generator=generator)
    kept[0] = length - 1
    mask = (torch.arange(length) < kept).long()
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


def _translated(generator: torch.Generator, rows: int, length: int) -> Batch:
    return {"input_ids": _words(generator, rows, length), "labels": _words(generator, rows, length - 2)}


def _gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = GPT2LMHeadModel(config)
    # The library tells the loss from the class's name, in vain for this one: it warns, then takes this very loss.
    model.loss_type = "ForCausalLM"
    return model


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_dropout=0.1,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def _bert() -> nn.Module:
    inherited: dict[str, Any] = {"num_labels": CLASSES}
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        pad_token_id=PAD,
        **inherited,
    )
    return BertForSequenceClassification(config)


def _t5() -> nn.Module:
    inherited: dict[str, Any] = {"decoder_start_token_id": PAD}
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        pad_token_id=PAD,
        eos_token_id=EOS,
        **inherited,
    )
    return T5ForConditionalGeneration(config)


ENTRIES = (
    Entry("gpt2", built_by(_gpt2), drawn_by(_causal, LENGTHS), _own_loss, tied=True, varies=True),
    Entry("llama", built_by(_llama), drawn_by(_causal, LENGTHS), _own_loss, varies=True),
    Entry("bert_classifier", built_by(_bert), drawn_by(_padded, LENGTHS), _own_loss, varies=True),
    Entry("t5", built_by(_t5), drawn_by(_translated, LENGTHS), _own_loss, tied=True, varies=True),
)
