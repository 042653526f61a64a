"""The updates of an asynchronous table in one process: each micro-batch with the versions that the table says.

It shares no mechanism with the runtime. All versions of all weights are kept as copies, and are copied into the model
before a micro-batch's forward and, where they differ, once more before its backward, behind autograd's back: what a
forward saved of a weight is then read as it is in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from autopipe.core.schedule import Schedule
from autopipe.core.versions import uses
from autopipe.runtime.own.pipemare import PipeMare

Loss = Callable[[int, int], torch.Tensor]
"""The loss of micro-batch ``within`` of an update, divided by their number, with the model's weights as they are."""


class Recurrence:
    """The updates of ``model`` in a table for so many; plain SGD.

    Parameter ``name`` belongs to ``stage_of[name]``; ``ages`` are the stages' delays in the steady part.
    """

    def __init__(
        self,
        model: nn.Module,
        table: Schedule,
        stage_of: Mapping[str, int],
        ages: Sequence[float],
        lr: float,
        mitigation: PipeMare | None,
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._table, self._stage_of, self._lr = table, stage_of, lr
        self._mitigation = mitigation if table.weights == "latest" else None
        self._delays = ages
        self._history = {name: [p.detach().clone()] for name, p in self._parameters.items()}
        self._change = {name: torch.zeros_like(p.data) for name, p in self._parameters.items()}

    def run(self, loss: Loss) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
        """All updates: the loss and the gradients, by name, of each."""
        losses, gradients = [], []
        for update in range(self._table.updates):
            total = 0.0
            for parameter in self._parameters.values():
                parameter.grad = None
            for within in range(self._table.per_update):
                batch = update * self._table.per_update + within
                self._load(batch, backward=False)
                value = loss(update, within)
                self._load(batch, backward=True)
                value.backward()
                total += float(value.detach())
            losses.append(total)
            gradients.append({n: p.grad.clone() for n, p in self._parameters.items() if p.grad is not None})
            self._step(update)
        return losses, gradients

    @torch.no_grad()
    def _load(self, batch: int, *, backward: bool) -> None:
        table = uses(self._table)
        for name, parameter in self._parameters.items():
            stage = self._stage_of[name]
            use = table[stage, batch]
            value = self._history[name][use.backward if backward else use.forward]
            if backward and self._mitigation and self._mitigation.decay is not None:
                value = value - self._delays[stage] * self._change[name]
            parameter.data.copy_(value)

    @torch.no_grad()
    def _step(self, update: int) -> None:
        for name, parameter in self._parameters.items():
            delay = self._delays[self._stage_of[name]]
            factor = self._mitigation.factor(delay, update) if self._mitigation else 1.0
            old = self._history[name][update]
            gradient = torch.zeros_like(old) if parameter.grad is None else parameter.grad
            self._history[name].append(old - self._lr * factor * gradient)
            if self._mitigation and self._mitigation.decay is not None and delay:
                keep = self._mitigation.decay ** (1 / delay)
                self._change[name] = keep * self._change[name] + (1 - keep) * (self._history[name][-1] - old)


def stage_of(layers: Sequence[Sequence[str]], table: Schedule, cuts: Sequence[int]) -> dict[str, int]:
    """The stage of each parameter, from the names that each layer owns and the cuts."""
    bounds = [0, *cuts, len(layers)]
    return {
        name: stage
        for stage in range(table.stages)
        for layer in range(bounds[stage], bounds[stage + 1])
        for name in layers[layer]
    }
