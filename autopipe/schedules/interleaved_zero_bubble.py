"""Interleaved zero bubble, as torch orders it: interleaved 1F1B with weight gradients put off.

Rank i warms up one forward a hop less than interleaved 1F1B, and puts off i weight gradients:

    rank 0   0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    rank 1   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1

With one stage on a rank this is ZB-H1's order (Qi et al., 2023, arXiv 2401.10241) at equal times.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule
from autopipe.schedules.interleaved import forwards_and_backwards, rounds_of


@schedule("InterleavedZeroBubble", stages_per_rank=(), aliases=("ScheduleInterleavedZeroBubble",))
def interleaved_zero_bubble(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Forward and input gradient in turn; rank i's weight gradients come i input gradients late."""
    rounds = rounds_of(shape)
    return tuple(_row(shape, rank, rounds) for rank in range(shape.ranks))


def _row(shape: Shape, rank: int, rounds: Sequence[range]) -> tuple[Action, ...]:
    stages = shape.stages_of(rank)
    forwards, backwards = forwards_and_backwards(stages, rounds)
    ahead = min(len(forwards), (len(stages) - 1) * len(rounds[0]) + shape.ranks - 1 - rank)
    row = forwards[:ahead]
    for number, (stage, _, batch) in enumerate(backwards):
        row += forwards[ahead + number : ahead + number + 1]
        row.append(Action(stage, Op.I, batch))
        if number >= rank:
            row.append(backwards[number - rank]._replace(op=Op.W))
    late = backwards[max(0, len(backwards) - rank) :]
    return (*row, *(action._replace(op=Op.W) for action in late))
