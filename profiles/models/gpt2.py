"""GPT-2 in its four sizes (Radford et al., 2019): 1,024 tokens, bfloat16, dropout as published."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 1024


def _gpt2(layers: int, width: int, heads: int) -> nn.Module:
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
    return GPT2LMHeadModel(config).to(torch.bfloat16)


def small() -> nn.Module:
    """124 M parameters."""
    return _gpt2(12, 768, 12)


def medium() -> nn.Module:
    """355 M parameters."""
    return _gpt2(24, 1024, 16)


def large() -> nn.Module:
    """774 M parameters."""
    return _gpt2(36, 1280, 20)


def xl() -> nn.Module:
    """1.56 B parameters."""
    return _gpt2(48, 1600, 25)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, and the same shifted by one."""
    tokens = torch.randint(GPT2Config().vocab_size, (batch_size, TOKENS + 1))
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
