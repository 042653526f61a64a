"""Llama 3 in four sizes (the 1B and 3B of Llama 3.2, the 8B and 70B of Llama 3.1): 4,096 tokens, bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, VOCABULARY = 4096, 128256


def _llama(layers: int, width: int, heads: int, inner: int, tied: bool) -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=131072,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def b1() -> nn.Module:
    """1.24 B parameters."""
    return _llama(16, 2048, 32, 8192, tied=True)


def b3() -> nn.Module:
    """3.21 B parameters."""
    return _llama(28, 3072, 24, 8192, tied=True)


def b8() -> nn.Module:
    """8.03 B parameters."""
    return _llama(32, 4096, 32, 14336, tied=False)


def b70() -> nn.Module:
    """70.6 B parameters."""
    return _llama(80, 8192, 64, 28672, tied=False)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, and the same shifted by one."""
    tokens = torch.randint(VOCABULARY, (batch_size, TOKENS + 1))
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
