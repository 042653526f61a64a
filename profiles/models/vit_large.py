"""ViT-L/16 (Dosovitskiy et al., 2021): 304 M parameters, images of 224 × 224, bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

CLASSES = 1000


def build_model() -> nn.Module:
    """24 layers, 1,024 wide, patches of 16 × 16."""
    config = ViTConfig(
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config).to(torch.bfloat16)


def example_batch(batch_size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random images and classes."""
    images = torch.randn(batch_size, 3, 224, 224, dtype=torch.bfloat16)
    return {"pixel_values": images}, torch.randint(CLASSES, (batch_size,))


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the classes."""
    return nn.functional.cross_entropy(output.logits, target)
