"""Gradient clipping by global norm, without a flush.

In an asynchronous pipeline there is no moment at which all gradients of an update are there: the last stage steps when
the first one still waits for its gradient. So the norm that a stage clips by takes its own gradient of this update, and
of every other stage the newest norm that has come along the pipeline with activations and gradients: of later stages
that of the same update, of earlier ones that of some updates before. It is the same in every run, since it depends on
the table alone. Where a run has a single update, and so ends in a flush, the norm is that of all stages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from autopipe.runtime.own.weights import Versions

_EPS = 1e-6


class Norms:
    """The newest squared norm that is known of each stage's gradient, with the update that it is of (−1: none yet)."""

    def __init__(self, stages: int, max_norm: float) -> None:
        self.max_norm = max_norm
        self._known = torch.stack([torch.full((stages,), -1.0), torch.zeros(stages)]).double()

    def like(self) -> tuple[torch.Tensor, ...]:
        """What goes along with every message, as a meta tensor."""
        return (self._known.to("meta"),)

    def told(self) -> torch.Tensor:
        """What goes along with a message now."""
        return self._known.clone()

    def hear(self, told: torch.Tensor) -> None:
        """Take over what is newer."""
        self._known = torch.where(told[0] > self._known[0], told, self._known)

    def note(self, stage: int, update: int, weights: Versions) -> None:
        """This stage's gradient of an update is whole."""
        self._known[0, stage] = update
        self._known[1, stage] = sum(_squares(weights.parameters.values()), torch.zeros((), dtype=torch.float64))

    def restart(self) -> None:
        """A run begins, whose updates are counted from 0; norms of the one before stay known as older than that."""
        self._known[0] = self._known[0].clamp(max=-0.5)

    def clip(self, weights: Versions, *, flushed: bool) -> float:
        """Scale the stage's gradient so that the norm is at most ``max_norm``; the norm before."""
        if flushed:
            others = torch.arange(self._known.shape[1]) != dist.get_rank()
            dist.all_reduce(self._known[1].masked_fill_(others, 0.0))
        norm = float(self._known[1].sum().sqrt())
        scale = min(1.0, self.max_norm / (norm + _EPS))
        for parameter in weights.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return norm


def _squares(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad.double().square().sum().cpu() for p in parameters if p.grad is not None]
