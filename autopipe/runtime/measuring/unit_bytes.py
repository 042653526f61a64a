"""What each layer of a chain holds for its backward, makes, and needs besides, counted in live tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autopipe.runtime.ranks.memory import LiveBytes, unique_bytes
from autopipe.runtime.stages.chain import Chain, Tensors, detached


@dataclass
class UnitBytes:
    """Bytes of one unit. It holds what it made and what some unit, itself or a later one, keeps for its backward.

    ``workspace`` is the most that was alive while it ran beyond what was there before and what it holds.
    """

    held_after_forward: int = 0
    held_after_input_grad: int = 0
    output: int = 0
    workspace: int = 0


def unit_bytes(chain: Chain, deferred: Chain, inputs: Mapping[str, torch.Tensor], target: Any) -> list[UnitBytes]:
    """The bytes of each unit for one micro-batch; gradients are there before, as in the middle of a step."""
    units = [UnitBytes() for _ in chain.units]
    _held_after_forward(chain, units, inputs, target)
    _backward_workspace(chain, units, inputs, target)
    _held_after_input_grad(deferred, units, inputs, target)
    return units


def _there_before(chain: Chain, inputs: Mapping[str, torch.Tensor], target: Any) -> list[torch.Tensor]:
    """What no layer makes: parameters, their gradients, buffers, the micro-batch. Their views must not count."""
    tensors: list[torch.Tensor | None] = [*inputs.values(), *tree_leaves(target)]
    for unit in chain.units:
        tensors += [*unit.parameters(), *(p.grad for p in unit.parameters()), *unit.buffers()]
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]


def _held_after_forward(chain: Chain, units: list[UnitBytes], inputs: Mapping[str, torch.Tensor], target: Any) -> None:
    """One graph through all units, so that an output that nobody keeps is freed as inside a stage.

    The model's outputs are kept: torch's runtime keeps them until their backward.
    """
    peaks = []
    with LiveBytes(_there_before(chain, inputs, target)) as live:
        sent: Tensors = ()
        outputs: Tensors = ()
        for index, unit in enumerate(units):
            live.label, before = index, live.current
            live.reset_peak()
            sent = chain.units[index](*sent, **inputs)
            if index == len(units) - 1:
                outputs, sent = sent, chain.loss(sent, target)
            unit.output = unique_bytes(sent)
            peaks.append(live.peak - before)
        held = live.by_label()
        del outputs
        for index, unit in enumerate(units):
            unit.held_after_forward = held[index]
            unit.workspace = max(0, peaks[index] - held[index])
        sent[0].backward()


def _run_forward(
    chain: Chain, live: LiveBytes, inputs: Mapping[str, torch.Tensor], target: Any
) -> tuple[list[Tensors], list[Tensors]]:
    received: list[Tensors] = [()]
    sent: list[Tensors] = []
    for index in range(len(chain.units)):
        live.label = index
        sent.append(chain.forward_unit(index, received[-1], inputs, target))
        received.append(detached(sent[-1]))
    return received[:-1], sent


def _backward_workspace(chain: Chain, units: list[UnitBytes], inputs: Mapping[str, torch.Tensor], target: Any) -> None:
    with LiveBytes(_there_before(chain, inputs, target)) as live:
        received, sent = _run_forward(chain, live, inputs, target)
        gradients: Sequence[torch.Tensor | None] = [None]
        for unit in reversed(units):
            before = live.current
            live.reset_peak()
            chain.backward_unit(sent.pop(), gradients)
            unit.workspace = max(unit.workspace, live.peak - before)
            gradients = [value.grad for value in received.pop()]


def _held_after_input_grad(
    deferred: Chain, units: list[UnitBytes], inputs: Mapping[str, torch.Tensor], target: Any
) -> None:
    """Run all input gradients; what is alive then waits for the weight gradients."""
    waiting = []
    with LiveBytes(_there_before(deferred, inputs, target)) as live:
        received, sent = _run_forward(deferred, live, inputs, target)
        gradients: Sequence[torch.Tensor | None] = [None]
        for index in reversed(range(len(units))):
            live.label = index
            deferred.backward_unit(sent.pop(), gradients)
            waiting.append(deferred.units[index].weight_backward())
            gradients = [value.grad for value in received.pop()]
        del gradients
        held = live.by_label()
        for index, unit in enumerate(units):
            unit.held_after_input_grad = held[index]
        for run in waiting:
            run()
