"""ZB-2p (Qi et al., 2023, arXiv 2401.10241): the best of several list schedules in the memory of 2p micro-batches.

At equal times it does what ZB-H2 does:

    rank 0   0F0 0F1 0F2         0I0 0W0 0I1 0W1 0I2 0W2
    rank 1   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.presets import fit
from autopipe.schedules.zb_1p import searched


@schedule("ZB-2p", looks_at_times=True)
def zb_2p(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The best that fits in the memory of 2p micro-batches."""
    return fit(shape, times, 2 * shape.ranks, [*searched(shape, times)]).order
