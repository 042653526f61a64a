"""ZB-1p (Qi et al., 2023, arXiv 2401.10241): the best of several list schedules in the memory of p micro-batches.

At equal times it does what ZB-H1 does:

    rank 0   0F0 0F1         0I0 0W0 0F2 0I1 0W1     0I2 0W2
    rank 1       1F0     1I0 1F1     1I1 1W0 1F2     1I2 1W1 1W2

The authors' memory frees most at I; ``weight_part`` of the shape says how much is held from there to W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.ordering.listing import Rules
from autopipe.ordering.presets import backward_first, fit, in_turn, room


@schedule("ZB-1p", looks_at_times=True)
def zb_1p(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The best that fits in the memory of p micro-batches."""
    return fit(shape, times, shape.ranks, [*searched(shape, times)]).order


def searched(shape: Shape, times: Sequence[StageTimes]) -> Iterator[Rules]:
    """Rules for one stage on a rank: from ZB-H1's warm-up to as many forwards as the first gradient leaves time for."""
    ranks = range(shape.ranks, 0, -1)
    yield from in_turn(shape, [*ranks])
    yield from in_turn(shape, [2 * rank - 1 for rank in ranks])
    for share in (0.0, 0.125, 0.75, 1.0):
        yield from backward_first(shape, room(shape, times, share))
