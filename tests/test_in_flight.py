"""What stages keep of their boundaries, by hand and by a formula; tests/runtime/test_torch_stage.py has real ranks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.synthesis  # noqa: F401  (registers all schedules)
from autopipe.core.in_flight import Kept, in_turn, kept
from autopipe.core.schedule import Shape, kind, kinds, place
from tests.synthetic import random_schedule


def test_two_ranks_of_1f1b_as_drawn() -> None:
    """Behind stage 0: two activations sent, a gradient. Before stage 1: two received, a gradient sent and one made."""
    assert kept(kind("1F1B").schedule(2, 3)) == (Kept(0, 3), Kept(4, 0))


def test_gpipe_keeps_all() -> None:
    assert kept(kind("GPipe").schedule(2, 5)) == (Kept(0, 6), Kept(6, 0))


def test_1f1b_keeps_no_more_of_a_longer_batch() -> None:
    assert kept(kind("1F1B").schedule(4, 100)) == kept(kind("1F1B").schedule(4, 8))


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    """In a V of two ranks stages 1 and 2 are on rank 1: the activation and, until its backward, the gradient."""
    before, behind = zip(*kept(kind("ZB-V").schedule(2, 4, stages_per_rank=2)), strict=True)
    assert before[0] == before[2] == 0
    assert behind[3] == 0
    assert min(before[1], before[3], *behind[:3]) > 0


@pytest.mark.parametrize("name", [k.name for k in kinds() if k.ahead])
def test_what_runs_in_turn_follows_from_how_far_it_runs_ahead(name: str) -> None:
    ahead = kind(name).ahead
    assert ahead is not None
    for ranks in range(1, 7):
        for batches in range(1, 15):
            table = kind(name).schedule(ranks, batches)
            assert in_turn(ahead(Shape(ranks, batches, place("loop", ranks, 1))), batches) == kept(table)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_any_table_keeps_at_most_what_torch_would(seed: int) -> None:
    rng = random.Random(seed)
    ranks, batches = rng.randint(1, 4), rng.randint(1, 6)
    table = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=batches)
    for stage, (before, behind) in enumerate(kept(table)):
        assert 0 <= before <= 2 * batches
        assert 0 <= behind <= 2 * batches
        assert (before > 0) == (stage > 0 and table.placement[stage - 1] != table.placement[stage])
        assert (behind > 0) == (stage < table.stages - 1)


@pytest.mark.parametrize("chosen", kinds("own"), ids=lambda chosen: chosen.name)
def test_our_own_runtime_asks_ahead(chosen: object) -> None:
    """Two activations are asked for before the first forward, so that at least three are there with the one in use."""
    table = chosen.schedule(4, 8)  # type: ignore[attr-defined]
    for stage, (before, behind) in enumerate(kept(table)):
        assert (before >= 3) != table.is_first(stage)
        assert (behind >= 3) != table.is_last(stage)
