"""BERT-large (Devlin et al., 2019) with its masked-language head: 335 M parameters, 512 tokens, bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

TOKENS = 512


def build_model() -> nn.Module:
    """24 layers, 1,024 wide."""
    config = BertConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    return BertForMaskedLM(config).to(torch.bfloat16)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, and others as labels."""
    tokens = torch.randint(BertConfig().vocab_size, (2, batch_size, TOKENS))
    return {"input_ids": tokens[0]}, tokens[1]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
