"""Tables of any number of updates: what repeats, what is added, what is left out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.errors import ScheduleError, UsageError
from autopipe.core.periodic import for_updates, steady
from autopipe.core.schedule import Action, Schedule, kind
from autopipe.core.validation import validate

STALE = ("PipeDream", "PipeDream-Sync", "PipeDream-2BW", "PipeMare")


def one_f_one_b(rank: int, ranks: int, per_update: int, updates: int) -> str:
    """A row by hand: p − i forwards, then one of each; a step after every m-th backward."""
    count, ahead, text = per_update * updates, ranks - rank, []
    text += [f"{rank}F{j}" for j in range(min(ahead, count))]
    for j in range(count):
        text.append(f"{rank}B{j}")
        text += [f"{rank}O{j // per_update}"] * (j % per_update == per_update - 1)
        text += [f"{rank}F{j + ahead}"] * (j + ahead < count)
    return " ".join(text)


@given(st.sampled_from(STALE), st.integers(1, 5), st.integers(1, 6), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_any_number_of_updates_is_the_table_of_that_many(name: str, ranks: int, per_update: int, updates: int) -> None:
    per_update = max(per_update, ranks) if name == "PipeDream-2BW" else per_update
    table = for_updates(kind(name).schedule(ranks, per_update), updates)
    validate(table)
    assert (table.updates, table.per_update) == (updates, per_update)
    rows = [" ".join(map(str, row)) for row in table.order]
    assert rows == [one_f_one_b(rank, ranks, per_update, updates) for rank in range(ranks)]


def test_the_steady_part_lies_between_filling_and_draining() -> None:
    table = kind("PipeDream").schedule(4, 1)
    first, last = steady(table)
    assert first == 1
    assert table.updates - 1 - last == 3


def test_a_table_that_never_repeats_is_refused() -> None:
    rows = ("0F0 0B0 0O0 0F1 0B1 0O1",)
    table = Schedule("short", (0,), tuple(tuple(map(Action.parse, row.split())) for row in rows), "own", (), "stashed")
    assert steady(table) == (0, 1)
    with pytest.raises(ScheduleError, match="no two updates of its 1 run alike"):
        for_updates(for_updates(table, 1), 5)


def test_no_updates_is_no_table() -> None:
    with pytest.raises(UsageError, match="0 updates"):
        for_updates(kind("PipeDream").schedule(2, 1), 0)
