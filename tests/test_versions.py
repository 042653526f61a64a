"""Versions and delays against the papers' formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.periodic import for_updates
from autopipe.core.schedule import kind
from autopipe.core.versions import copies, delays, uses

counts = st.integers(1, 6)


@given(counts)
def test_pipedream_keeps_p_minus_i_versions_and_is_p_minus_1_minus_i_updates_late(ranks: int) -> None:
    table = kind("PipeDream").schedule(ranks, 1)
    assert delays(table) == tuple(ranks - 1 - rank for rank in range(ranks))
    assert [copies(table, rank) for rank in range(ranks)] == [ranks - rank for rank in range(ranks)]
    assert all(use.forward == use.backward for use in uses(table).values())


@given(counts)
def test_vertical_sync_gives_a_micro_batch_one_version_everywhere(ranks: int) -> None:
    table = kind("PipeDream-Sync").schedule(ranks, 1)
    assert delays(table) == (ranks - 1,) * ranks
    for batch in range(table.micro_batches):
        assert len({uses(table)[stage, batch].forward for stage in range(ranks)}) == 1
    assert [copies(table, rank) for rank in range(ranks)] == [ranks] * ranks


@given(counts, counts)
@settings(max_examples=30)
def test_2bw_is_one_update_late_with_two_versions(ranks: int, more: int) -> None:
    table = kind("2BW").schedule(ranks, ranks + more)
    assert delays(table) == (1,) * ranks
    for (_, batch), use in uses(table).items():
        assert use.forward == use.backward == max(0, batch // (ranks + more) - 1)
    assert [copies(table, rank) for rank in range(ranks)] == [2] * ranks


@given(counts, counts)
@settings(max_examples=30)
def test_pipemare_is_late_in_the_forward_only(ranks: int, per_update: int) -> None:
    table = kind("PipeMare").schedule(ranks, per_update)
    for (stage, batch), use in uses(table).items():
        assert use.backward == batch // per_update
        assert use.forward == max(0, (batch - (ranks - stage) + 1) // per_update)
    assert delays(table)[-1] == 0
    assert [copies(table, rank) for rank in range(ranks)] == [2] * (ranks - 1) + [1]


@pytest.mark.parametrize("name", ["PipeDream", "PipeDream-Sync", "PipeMare", "2BW"])
def test_a_run_of_one_update_is_synchronous(name: str) -> None:
    table = for_updates(kind(name).schedule(3, 4), 1)
    assert set(uses(table).values()) == {(0, 0, 0)}


def test_synchronous_schedules_have_one_version() -> None:
    table = kind("1F1B").schedule(3, 4)
    assert delays(table) == (0, 0, 0)
    assert [copies(table, stage) for stage in range(3)] == [1, 1, 1]
