from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopipe.solvers.bands import banded
from autopipe.solvers.brute import smallest, splits
from autopipe.solvers.chain_dp import (
    Split,
    prefix_sums,
    smallest_end,
    smallest_maxima,
    smallest_maximum,
    smallest_step,
    smallest_sum,
    suffix_sums,
    suffix_ways,
    table,
)

Floats = NDArray[np.float64]


@st.composite
def tables(draw: st.DrawFn) -> Floats:
    """Any stage costs at all: by stage and range, small whole numbers so that ties abound, some not allowed."""
    pieces = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(pieces, 4)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, draw(st.sampled_from([3, 1000])), (stages, pieces + 1, pieces + 1)).astype(float)
    costs[rng.random(costs.shape) < draw(st.sampled_from([0.0, 0.2, 0.6]))] = np.inf
    return np.where(np.triu(np.ones_like(costs[0]), 1) > 0, costs, np.inf)


def stage_values(costs: Floats, positions: tuple[int, ...]) -> list[float]:
    return [float(costs[s, a, b]) for s, (a, b) in enumerate(pairwise(positions))]


def brute(costs: Floats, objective: Callable[[list[float]], float]) -> Split | None:
    stages, width, _ = costs.shape
    return smallest(width - 1, stages, lambda positions: objective(stage_values(costs, positions)))


@given(tables())
@settings(max_examples=400)
def test_smallest_sum_is_brute_force_with_the_same_ties(costs: Floats) -> None:
    assert smallest_sum(costs) == brute(costs, sum)


@given(tables())
@settings(max_examples=400)
def test_smallest_maximum_is_brute_force(costs: Floats) -> None:
    found, expected = smallest_maximum(costs), brute(costs, max)
    assert (found and found.value) == (expected and expected.value)
    if found:
        assert max(stage_values(costs, found.positions)) == found.value


@given(tables())
@settings(max_examples=200)
def test_ties_of_the_maximum_last_cut_first_then_the_rest_by_itself(costs: Floats) -> None:
    found = smallest_maximum(costs)
    while found and len(found.positions) > 2:
        last = [p[-2] for p in splits(costs.shape[1] - 1, len(costs)) if max(stage_values(costs, p)) == found.value]
        assert found.positions[-2] == min(last)
        costs = costs[:-1, : found.positions[-2] + 1, : found.positions[-2] + 1]
        rest = smallest_maximum(costs)
        assert rest is not None
        assert rest.positions == found.positions[:-1]
        found = rest


@given(tables(), st.integers(0, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=400)
def test_smallest_step_is_brute_force_with_the_same_ties(work: Floats, repeats: int, seed: int) -> None:
    other = np.random.default_rng(seed).integers(0, 50, work.shape).astype(float)

    def step(positions: tuple[int, ...]) -> float:
        largest = max(stage_values(work, positions))
        return sum(stage_values(work + other, positions)) + (repeats * largest if largest < np.inf else np.inf)

    assert smallest_step(work, other, repeats) == smallest(work.shape[1] - 1, len(work), step)


@given(tables())
@settings(max_examples=200)
def test_prefix_sums_are_the_least_sums_before_a_stage(costs: Floats) -> None:
    found = prefix_sums(costs)
    for stage in range(1, len(costs)):
        for position in range(costs.shape[1]):
            part = costs[:stage, : position + 1, : position + 1]
            best = smallest_sum(part) if position else None
            assert found[stage, position] == (best.value if best else np.inf)
    assert list(found[0]) == [0.0] + [np.inf] * (costs.shape[1] - 1)


@given(tables())
def test_smallest_maxima_are_those_of_each_number_of_stages(costs: Floats) -> None:
    pieces = costs.shape[1] - 1
    for stages, value in enumerate(smallest_maxima(costs[0], pieces), 1):
        found = smallest_maximum(np.stack([costs[0]] * stages))
        assert value == (found.value if found else np.inf)


def test_table_asks_for_every_range_of_every_stage() -> None:
    costs = table(lambda stage, start, stop: 100 * stage + 10 * start + stop, 2, 3)
    assert costs[1, 0, 2] == 102
    assert np.isinf(costs[:, 2, 1]).all()
    assert np.isinf(costs[:, 1, 1]).all()


def test_uneven_devices_and_memory_by_position() -> None:
    """Six equal layers; the second device is twice as fast, the third holds only one layer."""
    speed = (1, 2, 1)

    def cost(stage: int, start: int, stop: int) -> float:
        return np.inf if stage == 2 and stop - start > 1 else (stop - start) / speed[stage]

    found = smallest_maximum(table(cost, 3, 6))
    assert found is not None
    assert found.value == 2
    assert found.positions in {(0, 1, 5, 6), (0, 2, 5, 6)}


def test_nothing_allowed_is_none() -> None:
    nothing = np.full((2, 4, 4), np.inf)
    assert smallest_maximum(nothing) is None
    assert smallest_sum(nothing) is None
    assert smallest_step(nothing, np.zeros_like(nothing), 3) is None
    assert smallest(3, 2, lambda positions: float("inf")) is None
    assert smallest(2, 3, lambda positions: 0.0) is None


def test_few_passes_for_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold search does not try every level: 96 uneven layers have thousands."""
    from autopipe.solvers import chain_dp

    rng = np.random.default_rng(0)
    layers = np.concatenate([[0], np.cumsum(rng.integers(900, 1100, 96))]).astype(float)
    work = np.where(np.triu(np.ones((97, 97)), 1) > 0, layers[None, :] - layers[:, None], np.inf)
    calls = []
    real = chain_dp.smallest_sum
    monkeypatch.setattr(chain_dp, "smallest_sum", lambda costs: calls.append(1) or real(costs))
    costs = np.broadcast_to(work, (16, 97, 97))
    hops = np.broadcast_to(np.zeros(97), (16, 97, 97))
    assert smallest_step(costs, hops, 31) is not None
    assert len(calls) < 30


@given(tables(), st.integers(0, 2**32 - 1))
@settings(max_examples=400)
def test_smallest_end_is_brute_force(ends: Floats, seed: int) -> None:
    heads = np.random.default_rng(seed).integers(0, 9, ends.shape).astype(float)

    def end(positions: tuple[int, ...]) -> float:
        before = np.cumsum([0.0, *stage_values(heads, positions)[:-1]])
        return float(np.max(before + stage_values(ends, positions)))

    found, expected = smallest_end(heads, ends), smallest(ends.shape[1] - 1, len(ends), end)
    assert (found and found.value) == (expected and expected.value)
    if found and expected:
        equal = [p for p in splits(ends.shape[1] - 1, len(ends)) if end(p) == expected.value]
        assert end(found.positions) == found.value
        least = min(sum(stage_values(heads, p)) for p in equal)
        assert sum(stage_values(heads, found.positions)) == least


def test_smallest_end_by_hand() -> None:
    """Six layers of 1, two stages, four micro-batches, head = F + I = 2 of a layer's 3, end = 4 · 3 of each layer.

    Cuts at 2, 3, 4: max(24, 4 + 48), max(36, 6 + 36), max(48, 8 + 24) = 52, 42, 48.
    """
    count = np.arange(7.0)[None, :] - np.arange(7.0)[:, None]
    layers = np.where(count > 0, count, np.inf)
    found = smallest_end(np.stack([2 * layers] * 2), np.stack([12 * layers] * 2))
    assert found == Split((0, 3, 6), 42.0)


@given(tables(), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_ways_behind_a_stage_are_brute_force(through: Floats, seed: int) -> None:
    """The longest way ends alone in one of the stages behind, and goes through all between."""
    alone = through + np.random.default_rng(seed).integers(0, 9, through.shape)
    found = suffix_ways(alone, through)
    stages, width, _ = through.shape

    def longest(stage: int, positions: tuple[int, ...]) -> float:
        ways, way = [], 0.0
        for behind, (start, stop) in enumerate(pairwise(positions), stage + 1):
            ways.append(way + alone[behind, start, stop])
            way += through[behind, start, stop]
        return float(max(ways))

    assert [*found[-1]] == [*[np.inf] * (width - 1), 0.0]
    for stage, begin in product(range(stages - 1), range(width)):
        parts = splits(width - 1 - begin, stages - 1 - stage)
        shifted = [tuple(begin + position for position in split) for split in parts] if begin < width - 1 else []
        assert found[stage, begin] == min((longest(stage, split) for split in shifted), default=np.inf)


@given(tables(), st.integers(1, 7))
@settings(max_examples=200)
def test_a_band_is_a_table_without_its_long_ranges(costs: Floats, reach: int) -> None:
    width = costs.shape[1]
    reach = min(reach, width - 1)
    long = np.triu(np.ones((width, width)), reach + 1) > 0
    cut, narrow = np.where(long, np.inf, costs), banded(costs, reach)
    assert smallest_sum(narrow) == smallest_sum(cut)
    assert smallest_maximum(narrow) == smallest_maximum(cut)
    assert smallest_step(narrow, np.zeros_like(narrow), 3) == smallest_step(cut, np.zeros_like(cut), 3)
    assert np.array_equal(prefix_sums(narrow), prefix_sums(cut))
    assert np.array_equal(suffix_sums(narrow), suffix_sums(cut))
    reversed_ = cut[::-1, ::-1, ::-1].transpose(0, 2, 1)
    assert np.array_equal(suffix_sums(cut), prefix_sums(reversed_)[::-1, ::-1])


@given(tables())
def test_ways_are_sums_where_all_goes_through_and_maxima_where_nothing_takes_time(costs: Floats) -> None:
    nothing = np.where(np.isfinite(costs), 0.0, np.inf)
    ways = suffix_ways(costs, nothing)
    for stage, begin in np.ndindex(len(costs) - 1, costs.shape[1]):
        behind = smallest_maximum(costs[stage + 1 :, begin:, begin:])
        assert ways[stage, begin] == (behind.value if behind else np.inf)
    assert np.array_equal(ways[-1], suffix_sums(costs)[-1])
