"""Micro-batch sizes between measured ones: whose seconds may be taken from the line between their neighbours.

The smallest, the largest and one size in the middle are measured; if the middle lies on the line between the ends,
layer by layer, so do the others, and they are interpolated. Bytes are counted at every size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopipe.core.profile import CostTable, LayerCost
from autopipe.runtime.measuring.measure import Samples
from autopipe.runtime.measuring.unit_bytes import UnitBytes

STRAIGHT = 0.04
"""How far, as a part of the model's time, the layers of the middle size may be off the line in all."""


def first_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes to measure before others may be interpolated: all where no more than three, else ends and middle."""
    ordered = sorted(sizes)
    if len(ordered) <= 3:
        return tuple(ordered)
    low, high = ordered[0], ordered[-1]
    middle = min(ordered[1:-1], key=lambda size: abs(math.log(size * size / (low * high))))
    return low, middle, high


def straight(samples: Mapping[int, Samples], sizes: Sequence[int]) -> bool:
    """Whether the middle of three measured sizes lies on the line between the others."""
    low, middle, high = (_seconds(samples[size]) for size in sizes)
    part = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])
    off = sum(abs(a + part * (b - a) - m) for a, m, b in zip(low, middle, high, strict=True))
    return off <= STRAIGHT * sum(middle)


def _seconds(samples: Samples) -> list[float]:
    return [f + b for f, b in zip(samples.median("forward"), samples.median("backward"), strict=True)]


def interpolated(size: int, tables: Sequence[CostTable], sizes: Mapping[int, UnitBytes]) -> CostTable:
    """The costs at a size between two of the tables; ``sizes`` are its bytes by the number of the layer."""
    below = max((table for table in tables if table.micro_batch < size), key=lambda table: table.micro_batch)
    above = min((table for table in tables if table.micro_batch > size), key=lambda table: table.micro_batch)
    part = (size - below.micro_batch) / (above.micro_batch - below.micro_batch)
    layers = []
    for index, (low, high) in enumerate(zip(below.layers, above.layers, strict=True)):
        counted = sizes.get(index, UnitBytes())
        layers.append(_between(low, high, part, counted))
    return CostTable(size, tuple(layers), interpolated=True)


def _between(low: LayerCost, high: LayerCost, part: float, size: UnitBytes) -> LayerCost:
    def at(name: str) -> float:
        first, second = float(getattr(low, name)), float(getattr(high, name))
        return first + part * (second - first)

    return LayerCost(
        forward_s=at("forward_s"),
        backward_s=at("backward_s"),
        input_grad_s=at("input_grad_s"),
        weight_grad_s=at("weight_grad_s"),
        held_after_forward_bytes=size.held_after_forward,
        held_after_input_grad_bytes=size.held_after_input_grad,
        output_bytes=size.output,
        workspace_bytes=size.workspace,
        optimizer_s=at("optimizer_s"),
        spread=max(low.spread, high.spread),
    )
