"""PipeMare (Yang et al., 2019, arXiv 1910.05124): PipeDream's order with one version of the weights.

    rank 0   0F0 0F1             0B0 0O0 0F2     0B1 0O1     0B2 0O2
    rank 1       1F0     1B0 1O0 1F1     1B1 1O1 1F2     1B2 1O2

Forward and backward of a micro-batch each meet the newest weights, so they meet different ones. What that costs is made
up for in the training (runtime/own/pipemare.py): learning rates by delay, and a backward with weights that are moved
back by the average change, which needs one more copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.schedule import Order, Shape, StageTimes, schedule
from autopipe.schedules.pipedream import one_f_one_b_without_flush


@schedule("PipeMare", weights="latest")
def pipemare(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """1F1B without a flush, a step after the last backward of each update."""
    return one_f_one_b_without_flush(shape)
