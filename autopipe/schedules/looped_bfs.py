"""Looped breadth-first (Lamy-Poirier, 2023, arXiv 2211.05953): GPipe with several stages on a rank in turn.

    rank 0   0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

Idle (p − 1)(F + B)/v at equal stages; every micro-batch's activations are held at once. Torch runs the backwards of a
stage from the last micro-batch to the first, which only waits longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule


@schedule("LoopedBFS", stages_per_rank=(), aliases=("ScheduleLoopedBFS",))
def looped_bfs(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The forwards of a rank's first stage, of its next one, …, then the backwards of its last stage, …"""
    return tuple(_row(shape.stages_of(rank), range(shape.micro_batches)) for rank in range(shape.ranks))


def _row(stages: Sequence[int], batches: range) -> tuple[Action, ...]:
    forwards = [Action(stage, Op.F, batch) for stage in stages for batch in batches]
    return (*forwards, *(Action(stage, Op.B, batch) for stage in reversed(stages) for batch in batches))
