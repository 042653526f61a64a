"""The profiles of the zero-bubble papers, and rows like them: what the schedule benchmarks run on.

Seconds of F, I and W of one rank and of a transfer, from the table of Qi et al. (2023, arXiv 2401.10241), with the
published idle of each rank's own time where they gave it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from autopipe.core.schedule import Shape, StageTimes, place


class Row(NamedTuple):
    """A model on ``ranks``; times in microseconds. ``weight_part`` of the activations is held between I and W."""

    name: str
    ranks: int
    micro_batches: int
    forward: int
    input_grad: int
    weight_grad: int
    transfer: int
    weight_part: float


def _part(hidden: int, heads: int, length: int = 1024) -> float:
    """Of 34h + 5as bytes a token and layer (Korthikanti et al., 2022) the weight gradients need 32h."""
    return 32 * hidden / (34 * hidden + 5 * heads * length)


ROWS = (
    Row("1.5B", 8, 24, 18522, 18086, 9337, 601, _part(2304, 24)),
    Row("1.5B", 8, 32, 18513, 18086, 9331, 626, _part(2304, 24)),
    Row("1.5B", 8, 64, 18546, 18097, 9321, 762, _part(2304, 24)),
    Row("6.2B", 8, 24, 29718, 29444, 19927, 527, _part(4096, 32)),
    Row("6.2B", 8, 32, 29802, 29428, 19530, 577, _part(4096, 32)),
    Row("6.2B", 8, 64, 29935, 29621, 19388, 535, _part(4096, 32)),
    Row("14.6B", 16, 48, 11347, 11248, 8132, 377, _part(5120, 40)),
    Row("14.6B", 16, 64, 11307, 11254, 8101, 379, _part(5120, 40)),
    Row("14.6B", 16, 128, 11325, 11308, 8109, 378, _part(5120, 40)),
    Row("28.3B", 32, 96, 10419, 10207, 7715, 408, _part(6144, 48)),
    Row("28.3B", 32, 128, 10408, 10204, 7703, 408, _part(6144, 48)),
    Row("28.3B", 32, 256, 10402, 10248, 7698, 460, _part(6144, 48)),
)


def stages_of(row: Row, stages_per_rank: int, how: str, *, weight_part: float = 1.0) -> tuple[Shape, list[StageTimes]]:
    """The row with each rank's work in equal stages; ``weight_part`` of the activations is held from I to W."""
    placement = place(how, row.ranks, stages_per_rank)
    hops = tuple(0.0 if a == b else row.transfer / 1e6 for a, b in pairwise(placement))
    unit = 1e-6 / stages_per_rank
    backward = row.input_grad + row.weight_grad
    each = StageTimes(row.forward * unit, backward * unit, row.input_grad * unit, row.weight_grad * unit)
    return Shape(row.ranks, row.micro_batches, placement, hops, weight_part), [each] * len(placement)
