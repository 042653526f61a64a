"""A narrow GPT-2 with many equal blocks, for benchmarks/profiling.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH, TOKENS, VOCABULARY, BLOCKS = 64, 64, 512, 96


def gpt(blocks: int) -> nn.Module:
    """The model with so many blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH, n_layer=blocks, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build_model() -> nn.Module:
    """The deepest one."""
    return gpt(BLOCKS)


def example_batch(micro_batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random tokens, each predicting itself."""
    tokens = torch.randint(VOCABULARY, (micro_batch_size, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens}, tokens


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over the tokens."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
