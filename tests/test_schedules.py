from __future__ import annotations

import importlib
import re
import sys
import types
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopipe.schedules
from autopipe.core.errors import UsageError
from autopipe.core.schedule import Action, Kind, Op, Shape, kind, kinds
from autopipe.core.validation import validate
from autopipe.schedules import gpipe, one_f_one_b


def drawing(module: types.ModuleType) -> tuple[tuple[Action, ...], ...]:
    """The rows of actions that a module's docstring shows."""
    rows = re.findall(r"^    rank \d+ (.*)$", module.__doc__ or "", re.MULTILINE)
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


@pytest.mark.parametrize(("module", "name"), [(gpipe, "GPipe"), (one_f_one_b, "1F1B")])
def test_order_is_the_drawing(module: types.ModuleType, name: str) -> None:
    assert len(drawing(module)) == 2
    assert kind(name).schedule(2, 3).order == drawing(module)


@pytest.mark.parametrize("registered", kinds(), ids=lambda k: k.name)
@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_every_registered_schedule_is_valid(registered: Kind, ranks: int, micro_batches: int) -> None:
    per_rank = registered.stages_per_rank[0] if registered.stages_per_rank else 1
    shape = Shape(ranks, micro_batches, registered.place(ranks, per_rank))
    if registered.refuses(shape):
        with pytest.raises(UsageError):
            registered.schedule(ranks, micro_batches, stages_per_rank=per_rank)
        return
    table = registered.schedule(ranks, micro_batches, stages_per_rank=per_rank)
    validate(table)
    assert table.micro_batches == micro_batches
    assert table.name == registered.name


def test_1f1b_with_fewer_micro_batches_than_ranks() -> None:
    assert kind("1F1B").schedule(4, 2).grid().splitlines() == [
        "rank 0   0F0 0F1 0B0 0B1",
        "rank 1   1F0 1F1 1B0 1B1",
        "rank 2   2F0 2F1 2B0 2B1",
        "rank 3   3F0 3B0 3F1 3B1",
    ]


@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_the_last_stage_of_1f1b_alternates(ranks: int, micro_batches: int) -> None:
    last = kind("1F1B").schedule(ranks, micro_batches).order[-1]
    assert last == tuple(Action(ranks - 1, op, b) for b in range(micro_batches) for op in (Op.F, Op.B))


def test_torch_names_are_aliases() -> None:
    assert kind("ScheduleGPipe").name == "GPipe"
    assert kind("schedule1f1b").name == "1F1B"


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"1F2B.*1F1B, GPipe"):
        kind("1F2B")


def test_other_packages_offer_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    outside = types.ModuleType("outside_schedules")
    monkeypatch.setitem(sys.modules, "outside_schedules", outside)
    monkeypatch.setattr(EntryPoint, "load", lambda entry: loaded.append(entry.value))
    entry = EntryPoint("mine", "outside_schedules", "autopipe.schedules")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if "schedules" in group else [])
    importlib.reload(autopipe.schedules)
    assert loaded == ["outside_schedules"]
