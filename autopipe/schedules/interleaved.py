"""Interleaved 1F1B (Narayanan et al., 2021, arXiv 2104.04473): 1F1B with several stages on a rank, in rounds.

A round takes about p micro-batches through all of a rank's stages, one stage after the other:

    rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Idle (p − 1)(F + B)/v at equal stages. Where m is not a multiple of p the rounds differ by one micro-batch at most; with
equal rounds the order is torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule


@schedule("Interleaved1F1B", stages_per_rank=(), aliases=("ScheduleInterleaved1F1B", "Interleaved", "VPP"))
def interleaved(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Warm-up forwards, then forward and backward in turn, then the backwards that are left."""
    rounds = rounds_of(shape)
    return tuple(_row(shape, rank, rounds) for rank in range(shape.ranks))


def rounds_of(shape: Shape) -> list[range]:
    """The micro-batches of each round: as many rounds as p goes into m, larger ones first."""
    count = max(1, shape.micro_batches // shape.ranks)
    size, more = divmod(shape.micro_batches, count)
    firsts = [n * size + min(n, more) for n in range(count + 1)]
    return [range(a, b) for a, b in pairwise(firsts)]


def forwards_and_backwards(stages: Sequence[int], rounds: Sequence[range]) -> tuple[list[Action], list[Action]]:
    """A rank's forwards in their order, and its backwards in theirs: the last stage of a round first."""
    forwards = [Action(stage, Op.F, batch) for batches in rounds for stage in stages for batch in batches]
    backwards = [Action(stage, Op.B, batch) for batches in rounds for stage in reversed(stages) for batch in batches]
    return forwards, backwards


def _row(shape: Shape, rank: int, rounds: Sequence[range]) -> tuple[Action, ...]:
    stages = shape.stages_of(rank)
    forwards, backwards = forwards_and_backwards(stages, rounds)
    ahead = min(len(forwards), (len(stages) - 1) * len(rounds[0]) + 2 * (shape.ranks - 1 - rank))
    row = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        row += [forward, backward]
    return (*row, *backwards[len(forwards) - ahead :])
