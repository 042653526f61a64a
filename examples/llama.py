"""A small Llama from its config, as transformers ships it; it computes its own loss from ``labels``.

autopipe plan examples/llama.py --devices 2 --global-batch 8
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, VOCABULARY = 64, 2048


def build_model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], None]:
    seed = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (batch_size, TOKENS), generator=seed)
    return {"input_ids": tokens, "labels": tokens}, None


def loss_fn(output: Any, target: None) -> torch.Tensor:
    return output.loss
