"""Models whose forward leaves something for the next one: a moving average, a counter, a hidden state.

What a micro-batch meets is then what the one before it left, as in one process: each stage must run its forwards in
micro-batch order, and there must be one copy of it. All named schedules but the two-way ones are like that. Those have
two copies, and may run norms, whose statistics no forward in training looks at.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Op, Schedule
from autopipe.runtime.capture import Captured
from autopipe.runtime.capture.blame import user_source

__all__ = ["check_in_turn"]


def check_in_turn(captured: Captured, schedule: Schedule, cuts: Sequence[int]) -> None:
    """Raises UsageError where a stage that leaves something behind runs its forwards in another order, or twice."""
    bounds = [0, *cuts, len(captured.layers)]
    for stage, part in enumerate(schedule.part_of):
        left = captured.carried(bounds[part], bounds[part + 1], met=schedule.ways > 1)
        if not left:
            continue
        what = f"{_where(captured, left)}: each forward changes {left} for the next one"
        if schedule.ways > 1:
            raise UsageError(f"{what}, and {schedule.name} trains {schedule.ways} copies of it: use a one-way schedule")
        row = schedule.order[schedule.placement[stage]]
        batches = [action.micro_batch for action in row if action.stage == stage and action.op is Op.F]
        for before, after in itertools.pairwise(batches):
            if after < before:
                raise UsageError(
                    f"{what}, and {schedule.name} runs {stage}F{before} before {stage}F{after}: "
                    f"use a schedule that keeps micro-batches in order"
                )


def _where(captured: Captured, name: str) -> str:
    """File and line of the forward of the module, the user's own, that holds what has this name."""
    return user_source(captured.model, name.rpartition(".")[0])
