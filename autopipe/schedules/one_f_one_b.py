"""1F1B (PipeDream-Flush, arXiv 2006.09503; DAPPLE, arXiv 2007.01045): one forward, one backward, in turn.

Rank i starts with p − i forwards, then runs a backward before each further forward:

    rank 0   0F0 0F1             0B0     0F2     0B1     0B2
    rank 1       1F0     1B0     1F1     1B1     1F2     1B2

Idle (p − 1)(F + B) at equal stages, as GPipe, but rank i holds only min(m, p − i) micro-batches. With fewer
micro-batches than ranks the first ranks run all their forwards before their first backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule


def _ahead(shape: Shape) -> list[int]:
    return [min(shape.stages - stage, shape.micro_batches) for stage in range(shape.stages)]


@schedule("1F1B", aliases=("Schedule1F1B", "PipeDream-Flush", "DAPPLE"), ahead=_ahead)
def one_f_one_b(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """Warm-up forwards, then backward and forward in turn, then the backwards that are left."""
    return tuple(_row(stage, ahead, shape.micro_batches) for stage, ahead in enumerate(_ahead(shape)))


def _row(stage: int, warm_up: int, micro_batches: int) -> tuple[Action, ...]:
    """``warm_up`` forwards come before the first backward."""
    row = [Action(stage, Op.F, batch) for batch in range(warm_up)]
    for batch in range(micro_batches):
        row.append(Action(stage, Op.B, batch))
        if batch + warm_up < micro_batches:
            row.append(Action(stage, Op.F, batch + warm_up))
    return tuple(row)
