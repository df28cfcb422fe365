# SPDX-License-Identifier: Apache-2.0
"""A tiny BERT, a tiny GPT-2 and data for them. Nothing here knows of patrickstar."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

VOCABULARY = 128
LENGTH = 12
NUM_LABELS = 3


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=6, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=NUM_LABELS,
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=6, n_head=2,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def sentences(num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows for the classifier."""
    return [
        {"input_ids": torch.randint(VOCABULARY, (LENGTH,)), "labels": torch.randint(NUM_LABELS, ())}
        for _ in range(num_rows)
    ]


def texts(num_rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows for the language model."""
    rows = [torch.randint(VOCABULARY, (LENGTH,)) for _ in range(num_rows)]
    return [{"input_ids": row, "labels": row} for row in rows]
