"""A small GPT-2 from its config, as transformers ships it: input and output embedding are one parameter.

autopipe plan examples/gpt2.py --devices 2 --global-batch 8 --replicas 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS, VOCABULARY = 64, 2048


def build_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=192,
        n_layer=6,
        n_head=6,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    seed = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (batch_size, TOKENS + 1), generator=seed)
    return {"input_ids": tokens[:, :-1]}, tokens[:, 1:]


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
