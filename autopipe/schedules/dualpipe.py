"""DualPipe (DeepSeek-AI, 2024, arXiv 2412.19437): two replicas of the model in opposite directions, I and W apart.

Rank r holds part r of the replica that begins on rank 0 and part p−1−r of the one that begins on rank p−1; each takes
half of the micro-batches. The ranks to either side of the middle are a DualPipeV of p/2 ranks each, whose "down" stage
is the one of the replica that begins on that side. So the rows are DualPipeV's:

    rank 0   0F0 3F2 0F1 3B2 3F3 0B0 3B3 0I1 0W1
    rank 1   2F2 1F0 2F3 1B0 1F1 2B2 1B1 2I3 2W3

Makespan 3m + p/2 − 1 at F = I = W = 1, peak p + 1 micro-batches' activations. Needs p and m even, m ≥ 2p.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import TWO_WAY, Order, Shape, StageTimes, schedule
from autopipe.schedules.chimera import refuses
from autopipe.schedules.dualpipe_v import Row


def _refuses(shape: Shape) -> str | None:
    if shape.micro_batches % 2:
        return "half of the micro-batches go each way: their number must be even"
    if shape.micro_batches < 2 * shape.ranks:
        return f"it needs at least {2 * shape.ranks} micro-batches, two for each rank"
    return refuses(shape)


@schedule("DualPipe", placement=TWO_WAY, refuses=_refuses)
def dualpipe(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Each rank's row, as that of DualPipeV on half of the ranks with half of the micro-batches."""
    return tuple(_row(shape, rank).row() for rank in range(shape.ranks))


def _row(shape: Shape, rank: int) -> Row:
    half, below = shape.micro_batches // 2, rank < shape.ranks // 2
    first, second = shape.stages_of(rank)
    down, up = (first, second) if below else (second, first)
    begins = {first: 0, second: half}
    inside = min(rank, shape.ranks - 1 - rank)
    return Row(down, up, inside, shape.ranks // 2, half, begins)
