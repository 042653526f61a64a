"""ZB-H2 (Qi et al., 2023, arXiv 2401.10241): ZB-H1 with twice its warm-up, so that ranks idle only before it.

Rank i has at most 2(p − i) − 1 micro-batches between forward and input gradient, and holds at most 2p − 1 until W:

    rank 0   0F0 0F1 0F2         0I0 0W0 0I1 0W1 0I2 0W2
    rank 1   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

Each rank idles for (p − 1)(F + I − 2W) from its own start; the flush at the end of a step adds (p − 1)F.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.presets import fit, in_turn


@schedule("ZB-H2", looks_at_times=True)
def zb_h2(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Forward and input gradient in turn, 2(p − i) − 1 of a rank's micro-batches between them."""
    ahead = [2 * (shape.ranks - rank) - 1 for rank in range(shape.ranks)]
    return fit(shape, times, 2 * shape.ranks - 1, [*in_turn(shape, ahead)]).order
