from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.solvers.brute import splits
from autopipe.solvers.chain_dp import Floats
from autopipe.solvers.chain_dp import smallest_step as chain_step
from autopipe.solvers.device_dp import Assigned, Option, smallest_maximum, smallest_step


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Option], tuple[int, ...], Floats | None]:
    """Classes of devices, replicas, any cost at all by stage and option, and transfers by both sides' options."""
    pieces = draw(st.integers(1, 5))
    stages = draw(st.integers(1, min(pieces, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    largest, missing = draw(st.sampled_from([4, 1000])), draw(st.sampled_from([0.0, 0.3]))
    classes = draw(st.integers(1, 2))
    available = tuple(draw(st.integers(0, 3)) for _ in range(classes))
    allowed = np.triu(np.ones((pieces + 1, pieces + 1)), 1) > 0

    def costs() -> Floats:
        table = rng.integers(0, largest, (stages, pieces + 1, pieces + 1)).astype(float)
        return np.where(allowed & (rng.random(table.shape) >= missing), table, np.inf)

    count = draw(st.integers(1, 3))
    options = [
        Option(int(rng.integers(classes)), costs(), costs() if draw(st.booleans()) else None, int(rng.integers(1, 3)))
        for _ in range(count)
    ]
    hops = rng.integers(0, largest, (count, count, pieces + 1)).astype(float) if draw(st.booleans()) else None
    return options, available, hops


def everything(options: list[Option], available: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All splits with all choices of options that the devices suffice for."""
    stages, width, _ = options[0].work.shape
    for chosen in product(range(len(options)), repeat=stages):
        uses = [sum(options[o].count for o in chosen if options[o].device == c) for c in range(len(available))]
        if all(used <= most for used, most in zip(uses, available, strict=True)):
            for positions in splits(width - 1, stages):
                yield positions, chosen


def devices(options: list[Option], chosen: tuple[int, ...]) -> int:
    return sum(options[o].count for o in chosen)


def brute(
    options: list[Option],
    available: tuple[int, ...],
    value: Callable[[tuple[int, ...], tuple[int, ...]], float],
) -> tuple[float, int] | None:
    """The smallest value, and the fewest devices that reach it."""
    found = [(value(p, chosen), devices(options, chosen)) for p, chosen in everything(options, available)]
    best = min(found, default=None)
    return best if best is not None and best[0] < np.inf else None


def of_stages(options: list[Option], positions: tuple[int, ...], chosen: tuple[int, ...], field: str) -> list[float]:
    tables = [getattr(options[o], field) for o in chosen]
    ranges = enumerate(zip(tables, pairwise(positions), strict=True))
    return [0.0 if t is None else float(t[s, a, b]) for s, (t, (a, b)) in ranges]


def of_hops(hops: Floats | None, positions: tuple[int, ...], chosen: tuple[int, ...]) -> list[float]:
    if hops is None:
        return []
    return [float(hops[a, b, c]) for (a, b), c in zip(pairwise(chosen), positions[1:-1], strict=True)]


def same(options: list[Option], found: Assigned | None, expected: tuple[float, int] | None) -> None:
    assert (found and (found.value, devices(options, found.options))) == expected


@given(cases())
@settings(max_examples=600, deadline=None)
def test_smallest_maximum_is_brute_force(case: tuple[list[Option], tuple[int, ...], Floats | None]) -> None:
    options, available, hops = case

    def value(positions: tuple[int, ...], chosen: tuple[int, ...]) -> float:
        return max([*of_stages(options, positions, chosen, "work"), *of_hops(hops, positions, chosen)])

    found = smallest_maximum(options, available, hops)
    same(options, found, brute(options, available, value))
    assert found is None or value(found.positions, found.options) == found.value


def compare_steps(case: tuple[list[Option], tuple[int, ...], Floats | None], repeats: int) -> None:
    options, available, hops = case

    def value(positions: tuple[int, ...], chosen: tuple[int, ...]) -> float:
        work = of_stages(options, positions, chosen, "work")
        other = [*of_stages(options, positions, chosen, "other"), *of_hops(hops, positions, chosen)]
        return sum(work) + sum(other) + (repeats * max(work) if max(work) < np.inf else np.inf)

    found = smallest_step(options, available, repeats, hops)
    same(options, found, brute(options, available, value))
    assert found is None or value(found.positions, found.options) == found.value


@given(cases(), st.integers(0, 30))
@settings(max_examples=600, deadline=None)
def test_smallest_step_is_brute_force(case: tuple[list[Option], tuple[int, ...], Floats | None], repeats: int) -> None:
    compare_steps(case, repeats)


@given(st.integers(0, 2**32 - 1), st.integers(0, 20))
def test_one_class_is_chain_dp(seed: int, repeats: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.integers(0, 9, (3, 7, 7)).astype(float)
    costs[:, np.tril(np.ones((7, 7))) > 0] = np.inf
    found, expected = smallest_step([Option(0, costs)], [3], repeats), chain_step(costs, np.zeros_like(costs), repeats)
    assert found is not None
    assert expected is not None
    assert (found.positions, found.value) == expected


def test_the_fast_device_takes_the_heavy_head_and_memory_decides_the_rest() -> None:
    """Five layers, the last one costs 6. One device is three times as fast but holds two layers."""
    layers = np.array([0, 1, 2, 3, 4, 10.0])
    work = layers[None, :] - layers[:, None]
    count = np.arange(6)[None, :] - np.arange(6)[:, None]
    work = np.where(count > 0, work, np.inf)
    slow, fast = np.stack([work] * 2), np.stack([np.where(count <= 2, work / 3, np.inf)] * 2)
    found = smallest_maximum([Option(0, slow), Option(1, fast)], [1, 1])
    assert found == Assigned((0, 3, 5), (0, 1), 3.0)


def test_a_thin_link_moves_the_cut() -> None:
    """Equal layers; a transfer from class 0 to class 1 costs 10 except at the first cut."""
    work = np.where(np.triu(np.ones((5, 5)), 1) > 0, np.arange(5.0)[None, :] - np.arange(5.0)[:, None], np.inf)
    table = np.stack([work] * 2)
    hops = np.full((2, 2, 5), 10.0)
    hops[0, 1, 1] = 0
    found = smallest_step([Option(0, table), Option(1, table)], [1, 1], 3, hops)
    assert found == Assigned((0, 1, 4), (0, 1), 4 + 9)


def test_too_few_devices_is_none() -> None:
    work = np.where(np.triu(np.ones((1, 4, 4)), 1) > 0, 1.0, np.inf)
    assert smallest_maximum([Option(0, work, count=2)], [1]) is None
    assert smallest_step([Option(0, work, count=2)], [1], 3) is None


@pytest.mark.slow
@given(cases(), st.integers(0, 30))
@settings(max_examples=5_000, deadline=None)
def test_smallest_step_is_brute_force_many_times(
    case: tuple[list[Option], tuple[int, ...], Floats | None], repeats: int
) -> None:
    compare_steps(case, repeats)
