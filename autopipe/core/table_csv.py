"""Action tables as CSV, as torch's pipeline runtime reads and writes them: a line a rank, an action a cell.

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

Empty cells are for the eye. Where stages live follows from where their actions are.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from autopipe.core.errors import FileError, ScheduleError
from autopipe.core.schedule import Action, Schedule

_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B\Z")
"""A forward and a backward that torch writes in one cell; its runtime runs one after the other."""


def to_csv(schedule: Schedule) -> str:
    """The table as CSV. Torch's ``_load_csv(path, format="compute_only")`` reads it."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.order)


def from_csv(text: str, name: str) -> Schedule:
    """The table in a CSV, not validated. Raises ScheduleError for a cell or a row that cannot be meant."""
    lines = [line for line in csv.reader(io.StringIO(text)) if line]
    order = tuple(tuple(action for cell in line for action in _actions(cell)) for line in lines)
    where: dict[int, int] = {}
    for rank, row in enumerate(order):
        for action in row:
            if where.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"{name}: rank {rank}: {action}: stage {action.stage} has actions on rank {where[action.stage]} "
                    f"too; a stage lives on one rank"
                )
    missing = sorted(set(range(max(where, default=-1) + 1)) - set(where))
    if missing or not where:
        raise ScheduleError(
            f"{name}: {f'no actions of stage {missing[0]}' if where else 'no actions'}: a row is missing"
        )
    return Schedule(name, tuple(where[stage] for stage in range(len(where))), order)


def read_csv(path: str | Path) -> Schedule:
    """The table in a file, by the file's name. Raises FileError where it cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None
    return from_csv(text, Path(path).stem)


def _actions(cell: str) -> list[Action]:
    cell = cell.strip()
    pair = _PAIR.match(cell)
    return [Action.parse(text) for text in (pair.groups() if pair else (cell,)) if text]
