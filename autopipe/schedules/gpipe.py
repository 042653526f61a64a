"""GPipe (Huang et al., 2019, arXiv 1811.06965): all forwards, then all backwards.

    rank 0   0F0 0F1 0F2             0B0     0B1     0B2
    rank 1       1F0 1F1 1F2     1B0     1B1     1B2

Idle (p − 1)(F + B) at equal stages; every micro-batch's activations are held at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes, schedule


@schedule("GPipe", aliases=("ScheduleGPipe",), ahead=lambda shape: [shape.micro_batches] * shape.stages)
def gpipe(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """All forwards of a rank's stage, then all its backwards, in micro-batch order."""
    batches = range(shape.micro_batches)
    return tuple(
        tuple(Action(stage, op, batch) for op in (Op.F, Op.B) for batch in batches) for stage in shape.placement
    )
