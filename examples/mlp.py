"""A plain perceptron: needs torch only.

autopipe plan examples/mlp.py --devices 2 --global-batch 64
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH, CLASSES = 512, 10


class Block(nn.Module):
    """Normalise, widen, narrow, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES))


def example_batch(batch_size: int) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    seed = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, 64, generator=seed)
    return (inputs,), torch.randint(CLASSES, (batch_size,), generator=seed)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)
