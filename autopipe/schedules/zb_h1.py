"""ZB-H1 (Qi et al., 2023, arXiv 2401.10241): 1F1B whose weight gradients fill the gaps, in 1F1B's memory.

Rank i has at most p − i micro-batches between forward and input gradient, and holds at most p until W. At equal times:

    rank 0   0F0 0F1         0I0 0W0 0F2 0I1 0W1     0I2 0W2
    rank 1       1F0     1I0 1F1     1I1 1W0 1F2     1I2 1W1 1W2

Idle (p − 1)(F + I − W). Which gaps a weight gradient fills depends on the times.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.presets import fit, in_turn


@schedule("ZB-H1", looks_at_times=True)
def zb_h1(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Forward and input gradient in turn, p − i of a rank's micro-batches between them."""
    ahead = [shape.ranks - rank for rank in range(shape.ranks)]
    return fit(shape, times, shape.ranks, [*in_turn(shape, ahead)]).order
