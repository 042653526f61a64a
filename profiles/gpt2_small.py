"""GPT-2 small with its real shapes (12 layers, 768 wide, 50,257 tokens), sequences of 128 tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 128


def build_model() -> nn.Module:
    """The model of 124 million parameters, newly initialised."""
    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, and the same shifted by one."""
    tokens = torch.randint(GPT2Config().vocab_size, (batch_size, TOKENS + 1))
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
