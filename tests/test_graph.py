from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.schedule import Action, Op, Schedule, Shape, kind
from autopipe.graph import Costs, Graph, costs_of
from autopipe.simulate import simulate
from tests.synthetic import random_cost, random_pipeline


@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_many_at_once_agree_with_one_at_a_time(seed: int, count: int) -> None:
    rng = random.Random(seed)
    table, stages, hops, overhead = random_pipeline(rng)
    batch = [stages, *([random_cost(rng) for _ in stages] for _ in range(min(count, 5)))]
    picked = [rng.randrange(len(batch)) for _ in range(count)]
    columns = [costs_of(batch[i], hops, overhead) for i in picked]
    joined = (np.concatenate(fields, axis=1) for fields in zip(*(c[:3] for c in columns), strict=True))
    steps = Graph.of(table).steps(Costs(*joined, columns[0].late_s))
    single = [simulate(table, one, hops, overhead_s=overhead).step_s for one in batch]
    assert steps == pytest.approx([single[i] for i in picked], rel=1e-12)


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("ranks", "batches"), [(1, 1), (1, 4), (3, 1), (4, 2), (3, 7), (2, 9)])
def test_what_runs_in_turn_is_walked_without_its_order(name: str, ranks: int, batches: int) -> None:
    schedule, ahead = kind(name).schedule(ranks, batches), kind(name).ahead
    assert ahead is not None
    counts = ahead(Shape(ranks, batches, schedule.placement))
    require_equal(Graph.in_turn(counts, batches, lambda: schedule), Graph.of(schedule))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_any_number_of_forwards_may_come_first(first: list[int], batches: int) -> None:
    """Never more than on the stage before."""
    ahead = [min(count, batches) for count in sorted(first, reverse=True)]
    rows = tuple(tuple(turn(stage, count, batches)) for stage, count in enumerate(ahead))
    schedule = Schedule("drawn", tuple(range(len(ahead))), rows)
    require_equal(Graph.in_turn(ahead, batches, lambda: schedule), Graph.of(schedule))


def turn(stage: int, ahead: int, batches: int) -> Iterator[Action]:
    yield from (Action(stage, Op.F, batch) for batch in range(ahead))
    for batch in range(batches):
        yield Action(stage, Op.B, batch)
        if batch + ahead < batches:
            yield Action(stage, Op.F, batch + ahead)


def require_equal(fast: Graph, plain: Graph) -> None:
    assert all(np.array_equal(a, b) for a, b in zip(fast.rows, plain.rows, strict=True))
    assert np.array_equal(fast.costs, plain.costs)
    for ours, theirs in zip(fast.levels, plain.levels, strict=True):
        assert ours.rows == theirs.rows
        assert all(np.array_equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
