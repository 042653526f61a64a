"""PipeDream (Narayanan et al., SOSP 2019): 1F1B that never flushes, an update after every backward.

Rank i starts with p − i forwards, then runs a backward, steps, and runs a forward, in turn (O optimizer step):

    rank 0   0F0 0F1             0B0 0O0 0F2     0B1 0O1     0B2 0O2
    rank 1       1F0     1B0 1O0 1F1     1B1 1O1 1F2     1B2 1O2

No idle time in the steady part. A micro-batch's backward meets the weights that its forward met, so rank i keeps up to
p − i versions of them, p − 1 − i updates old. With ``PipeDream-Sync`` every rank takes the version that the first one
took (vertical sync), p − 1 updates old, and all ranks keep p of them.

A table holds the updates from the first to the last one of a short run; core/periodic.py goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule

STEADY = 24
"""So many micro-batches, and two updates, the steady part of a table has at least: what the period is taken from."""


@schedule("PipeDream", weights="stashed")
def pipedream(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """1F1B without a flush, a step after the last backward of each update."""
    return one_f_one_b_without_flush(shape)


@schedule("PipeDream-Sync", weights="synced", aliases=("PipeDream-VerticalSync",))
def pipedream_sync(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The same order; the weights are those that the first rank had."""
    return one_f_one_b_without_flush(shape)


def one_f_one_b_without_flush(shape: Shape) -> Order:
    """Filling, a steady part, draining: for each rank p − i forwards, then backward and forward in turn."""
    fill = ceil(shape.ranks / shape.micro_batches)
    updates = 2 * fill + max(2, ceil(STEADY / shape.micro_batches))
    return tuple(_row(rank, shape.ranks - rank, shape.micro_batches, updates) for rank in range(shape.ranks))


def _row(stage: int, ahead: int, per_update: int, updates: int) -> tuple[Action, ...]:
    batches = per_update * updates
    row = [Action(stage, Op.F, batch) for batch in range(min(ahead, batches))]
    for batch in range(batches):
        row.append(Action(stage, Op.B, batch))
        if (batch + 1) % per_update == 0:
            row.append(Action(stage, Op.O, batch // per_update))
        if batch + ahead < batches:
            row.append(Action(stage, Op.F, batch + ahead))
    return tuple(row)
