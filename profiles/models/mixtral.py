"""Mixtral 8x7B (Jiang et al., arXiv:2401.04088): 46.7 B parameters, 4,096 tokens, bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

TOKENS, VOCABULARY = 4096, 32000


def build_model() -> nn.Module:
    """Two of eight experts a token."""
    config = MixtralConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        use_cache=False,
    )
    return MixtralForCausalLM(config).to(torch.bfloat16)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, and the same shifted by one."""
    tokens = torch.randint(VOCABULARY, (batch_size, TOKENS + 1))
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
