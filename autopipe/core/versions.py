"""Which weights a micro-batch meets in an asynchronous pipeline, how old they are, and how many versions are held.

The weights of a stage are numbered by its optimizer steps: version 0 is what the run begins with, step u makes version
u + 1. Of m micro-batches an update, micro-batch j belongs to update u = j // m. The policies (Schedule.weights):

- ``stashed``, PipeDream (Narayanan et al., 2019): the newest version of the stage when F runs; B meets the same one.
- ``synced``, PipeDream with vertical sync: at each stage the version that the first stage had when its F ran.
- ``double``, PipeDream-2BW (Narayanan et al., 2020, arXiv 2006.09503): version max(0, u − 1), at F and B of all
  micro-batches of update u, so W(t+1) = W(t) − lr · ∇f(W(t−1)).
- ``latest``, PipeMare (Yang et al., 2019, arXiv 1910.05124): the newest version when F runs, the newest when B runs.

The delay of a micro-batch is u − the version of its F: 0 in a synchronous pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from autopipe.core.errors import ScheduleError
from autopipe.core.periodic import steady
from autopipe.core.schedule import Op, Schedule


class Use(NamedTuple):
    """The update that a micro-batch belongs to, and the versions that its F and its B (or I) meet in a stage."""

    update: int
    forward: int
    backward: int


Uses = Mapping[tuple[int, int], Use]
"""By stage and micro-batch."""


@lru_cache(maxsize=16)
def uses(schedule: Schedule) -> Uses:
    """What each micro-batch meets in each stage. Raises ScheduleError for a version that is not made yet, or gone."""
    newest = {Op.F: _newest(schedule, (Op.F,)), Op.B: _newest(schedule, (Op.B, Op.I))}
    found = {}
    for (stage, batch), at_forward in newest[Op.F].items():
        update, at_backward = batch // schedule.per_update, newest[Op.B].get((stage, batch), at_forward)
        forward = {
            "flush": 0,
            "stashed": at_forward,
            "synced": newest[Op.F].get((0, batch), 0),
            "double": max(0, update - 1),
            "latest": at_forward,
        }[schedule.weights]
        backward = at_backward if schedule.weights == "latest" else forward
        if forward > at_forward or backward > update:
            raise ScheduleError(
                f"{schedule.name}: {stage}F{batch} needs version {forward} of the weights, but runs when the newest is "
                f"{at_forward}"
            )
        found[stage, batch] = Use(update, forward, backward)
    return found


def _newest(schedule: Schedule, ops: tuple[Op, ...]) -> dict[tuple[int, int], int]:
    """The number of optimizer steps that a stage has done when an action runs, by stage and micro-batch."""
    counts = [0] * schedule.stages
    found = {}
    for row in schedule.order:
        for stage, op, batch in row:
            if op is Op.O:
                counts[stage] += 1
            elif op in ops:
                found[stage, batch] = counts[stage]
    return found


def delays(schedule: Schedule) -> tuple[float, ...]:
    """How many updates old a stage's weights are at F in the steady part, on average over its micro-batches."""
    if not schedule.asynchronous:
        return (0.0,) * schedule.stages
    _, update = steady(schedule)
    first = update * schedule.per_update
    table = uses(schedule)
    return tuple(
        fmean(update - table[stage, batch].forward for batch in range(first, first + schedule.per_update))
        for stage in range(schedule.stages)
    )


def last_uses(schedule: Schedule, rank: int) -> dict[tuple[int, int], int]:
    """The place in a rank's row of the last action that meets a version, by stage and version."""
    table = uses(schedule)
    last = {}
    for place, (stage, op, batch) in enumerate(schedule.order[rank]):
        if op is not Op.O:
            use = table[stage, batch]
            last[stage, use.forward if op is Op.F else use.backward] = place
    return last


@lru_cache(maxsize=256)
def copies(schedule: Schedule, stage: int) -> int:
    """The most copies of a stage's weights at one time, the newest version counted.

    With ``latest`` they are one version and, where it is delayed, the average of its changes.
    """
    if schedule.weights == "latest":
        return 2 if delays(schedule)[stage] else 1
    if not schedule.asynchronous:
        return 1
    rank = schedule.placement[stage]
    last = last_uses(schedule, rank)
    newest, most = 0, 1
    for place, (where, op, _) in enumerate(schedule.order[rank]):
        if where == stage and op is Op.O:
            newest += 1
            older = sum(last.get((stage, version), -1) > place for version in range(newest))
            most = max(most, 1 + older)
    return most
