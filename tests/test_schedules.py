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
import autopipe.synthesis
from autopipe.core.errors import UsageError
from autopipe.core.periodic import for_updates
from autopipe.core.schedule import Action, Op, Order, kind, kinds
from autopipe.schedules import (
    chimera,
    dualpipe,
    dualpipe_v,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    pipemare,
    v_half,
    v_min,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
    zb_v,
)

MODULES = {
    "1F1B": one_f_one_b, "DualPipeV": dualpipe_v, "GPipe": gpipe, "Interleaved1F1B": interleaved,
    "InterleavedZeroBubble": interleaved_zero_bubble, "LoopedBFS": looped_bfs, "V-Half": v_half, "V-Min": v_min,
    "ZB-1p": zb_1p, "ZB-2p": zb_2p, "ZB-H1": zb_h1, "ZB-H2": zb_h2, "ZB-V": zb_v, "Synthesized": autopipe.synthesis,
    "Chimera": chimera, "DualPipe": dualpipe, "PipeDream": pipedream, "PipeDream-2BW": pipedream_2bw,
    "PipeMare": pipemare,
}  # fmt: skip
VARIANTS = {"Chimera-Doubled", "PipeDream-Sync"}
"""They share the file, and the drawing, of another one."""


def drawing(module: types.ModuleType) -> Order:
    """The rows of actions that a module's docstring shows."""
    rows = re.findall(r"^    rank \d+ (.*)$", module.__doc__ or "", re.MULTILINE)
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_every_schedule_is_in_the_list_of_drawings() -> None:
    assert set(MODULES) | VARIANTS == {k.name for k in kinds()}


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_order_is_the_drawing(name: str, module: types.ModuleType) -> None:
    drawn = drawing(module)
    ranks = len(drawn)
    assert ranks in (2, 4)
    batches = 1 + max(action.micro_batch for row in drawn for action in row)
    stages = 1 + max(action.stage for row in drawn for action in row)
    updates = 1 + max((action.micro_batch for action in drawn[0] if action.op is Op.O), default=0)
    per_rank = stages // ranks if kind(name).executor == "torch" else 1
    table = kind(name).schedule(ranks, batches // updates, stages_per_rank=per_rank)
    assert (for_updates(table, updates) if table.asynchronous else table).order == drawn


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


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ScheduleGPipe", "GPipe"),
        ("schedule1f1b", "1F1B"),
        ("ScheduleInterleaved1F1B", "Interleaved1F1B"),
        ("ScheduleLoopedBFS", "LoopedBFS"),
        ("ScheduleInterleavedZeroBubble", "InterleavedZeroBubble"),
        ("ScheduleZBVZeroBubble", "ZB-V"),
        ("ScheduleDualPipeV", "DualPipeV"),
    ],
)
def test_torch_names_are_aliases(alias: str, name: str) -> None:
    assert kind(alias).name == name


def test_unknown_schedule_names_the_known() -> None:
    with pytest.raises(UsageError, match=r"1F2B.*1F1B, Chimera.*DualPipeV, GPipe"):
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
