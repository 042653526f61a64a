"""What PipeMare does about weights that change between a micro-batch's forward and its backward (arXiv 1910.05124).

τ is a stage's delay: how many updates its weights change by between the two, on average (core/versions.py).

- T1, learning rate by delay: step k of the optimizer takes α / τ^(1 − min(k/K, 1)), K steps until that makes no
  difference. A delay below 1 never raises it.
- T2, discrepancy correction: the backward meets w − τ·δ, an estimate of what the forward met. δ ← γδ + (1 − γ)(w_new −
  w_old) is the average change, γ = D^(1/τ).
- T3, synchronous warm-up: the first updates are flushed, which have no delay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autopipe.runtime.own.weights import Newest


@dataclass(frozen=True)
class PipeMare:
    """``annealing`` is T1's K in updates, 0 for no T1; ``decay`` T2's D, None for no T2; ``warm_up`` T3's updates."""

    annealing: int = 100
    decay: float | None = 0.135
    warm_up: int = 0

    def factor(self, delay: float, update: int) -> float:
        """What T1 multiplies the learning rate by, in an asynchronous update counted from 0."""
        if not self.annealing:
            return 1.0
        power: float = max(delay, 1.0) ** (1 - min(update / self.annealing, 1.0))
        return 1 / power


class Correction:
    """T2 of one stage: the average change of its weights, and the weights that a backward meets."""

    def __init__(self, weights: Newest, delay: float, decay: float) -> None:
        self.change = {name: torch.zeros_like(p.data) for name, p in weights.parameters.items()}
        self._weights, self._delay = weights, delay
        self._keep = decay ** (1 / delay)

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._weights.parameters[name].data
        return torch.sub(value, self.change[name], alpha=self._delay)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Take an update of the weights into the average."""
        old = {name: p.data.clone() for name, p in self._weights.parameters.items()}
        yield
        for name, change in self.change.items():
            difference = self._weights.parameters[name].data - old[name]
            change.mul_(self._keep).add_(difference, alpha=1 - self._keep)


@contextmanager
def scaled_lr(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply every learning rate for one step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
