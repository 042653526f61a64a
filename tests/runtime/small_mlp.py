"""A model file for tests of long runs: the layers of examples/mlp.py, 32 wide."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, CLASSES = 32, 10


class Block(nn.Module):
    """Normalise, widen, narrow, add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES))


def example_batch(batch_size: int) -> tuple[tuple[torch.Tensor], torch.Tensor]:
    seed = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, 16, generator=seed),), torch.randint(CLASSES, (batch_size,), generator=seed)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)
