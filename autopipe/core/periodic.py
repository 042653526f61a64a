"""Asynchronous tables go on without a flush: what repeats in each row, and the table for any number of updates.

A row is divided at its optimizer steps. PipeDream's first rank of two reads then, with one micro-batch an update,

    0F0 0F1 0B0 0O0 | 0F2 0B1 0O1 | 0F3 0B2 0O2 | 0B3 0O3

and what stands between the bars repeats, each time one update and m micro-batches on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from autopipe.core.errors import ScheduleError, UsageError
from autopipe.core.schedule import Action, Op, Schedule

Row = Sequence[Action]


@lru_cache(maxsize=64)
def steady(schedule: Schedule) -> tuple[int, int]:
    """The first and the last update of the longest part in which every rank repeats itself.

    Raises ScheduleError for a table without two such updates, which says nothing of what comes after it.
    """
    parts = [_between_updates(row) for row in schedule.order]
    alike = [
        all(_moved(row[u], 1, schedule.per_update) == row[u + 1] for row in parts) for u in range(schedule.updates - 1)
    ]
    best, start = (0, 0), 0
    for update, same in enumerate([*alike, False]):
        if not same:
            best = max(best, (start, update), key=lambda run: run[1] - run[0])
            start = update + 1
    if best[0] == best[1]:
        raise ScheduleError(f"{schedule.name}: no two updates of its {schedule.updates} run alike on all ranks")
    return best


def for_updates(schedule: Schedule, updates: int) -> Schedule:
    """The table for that many updates: its steady part repeated, or what comes later left out."""
    if updates < 1:
        raise UsageError(f"{updates} updates cannot be run: it is a number from 1")
    if updates <= schedule.updates:
        batches = updates * schedule.per_update
        rows = tuple(
            tuple(a for a in row if a.micro_batch < (updates if a.op is Op.O else batches)) for row in schedule.order
        )
        return replace(schedule, order=rows)
    _, last = steady(schedule)
    more, size = updates - schedule.updates, schedule.per_update
    order = []
    for row in map(_between_updates, schedule.order):
        repeated = [_moved(row[last], by, size) for by in range(1, more + 1)]
        rest = [_moved(part, more, size) for part in row[last + 1 :]]
        order.append(tuple(action for part in [*row[: last + 1], *repeated, *rest] for action in part))
    return replace(schedule, order=tuple(order))


def _between_updates(row: Row) -> list[Row]:
    """The row in parts, each up to an optimizer step; what comes after the last one belongs to it."""
    ends = [0, *(place + 1 for place, action in enumerate(row) if action.op is Op.O)]
    ends[-1] = len(row)
    return [row[a:b] for a, b in pairwise(ends)]


def _moved(part: Row, updates: int, per_update: int) -> Row:
    """The same actions, so many updates later."""
    by = updates * per_update
    return tuple(a._replace(micro_batch=a.micro_batch + (updates if a.op is Op.O else by)) for a in part)
