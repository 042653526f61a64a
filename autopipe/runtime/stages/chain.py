"""Stages run one after another in one process: what measuring, and tests without ranks, look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopipe.runtime.capture import Captured
from autopipe.runtime.ranks.devices import Clock, Stopwatch, synchronize
from autopipe.runtime.stages.modules import StageModule

Tensors = tuple[torch.Tensor, ...]


def detached(sent: Tensors) -> Tensors:
    """What the next stage receives: the same values, cut off from their past."""
    return tuple(value.detach().requires_grad_(value.requires_grad) for value in sent)


class Chain:
    """Stages run one after another in one process, boundaries detached as between ranks.

    ``ranges`` are their layers. Some may be left out where the values that cross are alike; see sampling.
    """

    def __init__(
        self,
        captured: Captured,
        ranges: Sequence[tuple[int, int]],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        device: torch.device,
        *,
        deferred: bool = False,
    ) -> None:
        again = captured.checkpointed
        self.units = [
            StageModule(captured, index, start, stop, recompute=again, deferred=deferred)
            for index, (start, stop) in enumerate(ranges)
        ]
        self.clock: Stopwatch = Clock(device)
        self._captured = captured
        self._loss_fn = loss_fn
        self._deferred = deferred

    def forward_unit(self, index: int, received: Tensors, inputs: Mapping[str, torch.Tensor], target: Any) -> Tensors:
        """What a unit sends; the last one its loss."""
        leaving: Tensors = self.units[index](*received, **inputs)
        return leaving if index < len(self.units) - 1 else self.loss(leaving, target)

    def loss(self, outputs: Tensors, target: Any) -> Tensors:
        """What the last unit sends, from the model's flat outputs."""
        return (self._loss_fn(self._captured.unflatten(outputs), target),)

    def backward_unit(self, sent: Tensors, gradients: Sequence[torch.Tensor | None]) -> None:
        """A unit's backward, without its deferred part."""
        values = zip(sent, gradients, strict=True)
        pairs = [(v, g) for v, g in values if v.requires_grad and (g is not None or v.dim() == 0)]
        if pairs:
            torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])

    def run(self, inputs: Mapping[str, torch.Tensor], target: Any) -> dict[str, list[float]]:
        """Forward and backward of one micro-batch; seconds of each unit by what was timed."""
        mark, marks = self.clock.mark, dict[str, list[tuple[Any, Any]]](forward=[], main=[], weight_grad=[])
        received: list[Tensors] = [()]
        sent: list[Tensors] = []
        for index in range(len(self.units)):
            start = mark()
            sent.append(self.forward_unit(index, received[-1], inputs, target))
            marks["forward"].append((start, mark()))
            received.append(detached(sent[-1]))
        gradients: Sequence[torch.Tensor | None] = [None]
        received.pop()
        for unit in reversed(self.units):
            start = mark()
            self.backward_unit(sent.pop(), gradients)
            middle = mark()
            if self._deferred:
                unit.weight_backward()()
            marks["main"].insert(0, (start, middle))
            marks["weight_grad"].insert(0, (middle, mark()))
            gradients = [value.grad for value in received.pop()]
        synchronize(self.clock.device)
        times = {what: [self.clock.seconds(*pair) for pair in pairs] for what, pairs in marks.items()}
        main = times.pop("main")
        return times | {"input_grad": main} if self._deferred else {"forward": times["forward"], "backward": main}
