"""PipeDream-2BW (Narayanan et al., 2020, arXiv 2006.09503): two versions of the weights, updates of m micro-batches.

PipeDream's order, with a step after every m-th backward, here after every second one:

    rank 0   0F0 0F1         0B0 0F2     0B1 0O0 0F3     0B2     0B3 0O1
    rank 1       1F0 1B0     1F1 1B1 1O0     1F2 1B2     1F3 1B3 1O1

All micro-batches of an update meet the weights of one update
before, W(t+1) = W(t) − lr · ∇f(W(t−1)), on every rank; so a rank keeps two versions, whatever p is. Needs m ≥ p.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.schedules.pipedream import one_f_one_b_without_flush


def _refuses(shape: Shape) -> str | None:
    if shape.micro_batches >= shape.ranks:
        return None
    return f"an update needs at least {shape.ranks} micro-batches, one for each rank"


@schedule("PipeDream-2BW", weights="double", refuses=_refuses, aliases=("2BW",))
def pipedream_2bw(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """1F1B without a flush, a step after the last backward of each update."""
    return one_f_one_b_without_flush(shape)
