from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.solvers.brute import splits
from autopipe.solvers.replicas import Replicated, Ring, smallest_longest


def ring(works: list[float], gradients: list[float], choices: list[int], *, longest: int | None = None) -> Ring:
    """Layers with seconds of work and of reduction; a stage holds at most ``longest`` layers."""
    n = len(works)
    count = np.arange(n + 1)[None, :] - np.arange(n + 1)[:, None]
    sums, reduced = (np.concatenate([[0], np.cumsum(values)]) for values in (works, gradients))
    allowed = (count > 0) & (count <= (longest or n))
    return Ring(np.where(allowed, sums[None, :] - sums[:, None], np.inf), reduced[None, :] - reduced[:, None], choices)


def brute(scaling: Ring, layers: int, choices: list[int], devices: int) -> tuple[float, int] | None:
    """The smallest value, and the fewest devices that reach it."""
    found = []
    for stages in range(1, layers + 1):
        for positions, counts in product(splits(layers, stages), product(choices, repeat=stages)):
            if sum(counts) <= devices:
                ranges = zip(pairwise(positions), counts, strict=True)
                found.append((max(scaling.cost(a, b, r) for (a, b), r in ranges), sum(counts)))
    best = min(found, default=None)
    return best if best and best[0] < np.inf else None


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=4),
    st.sampled_from([[1, 2, 3, 4], [1, 2, 4], [1], [2, 4]]),
    st.integers(1, 7),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([1.0, 0.1, 1 / 3]),
)
@settings(max_examples=600, deadline=None)
def test_smallest_longest_is_brute_force(
    layers: list[tuple[int, int]], choices: list[int], devices: int, longest: int | None, unit: float
) -> None:
    scaling = ring([w * unit for w, _ in layers], [g * unit for _, g in layers], choices, longest=longest)
    found, expected = smallest_longest(scaling, devices), brute(scaling, len(layers), choices, devices)
    assert (found and (found.value, sum(found.replicas))) == expected
    if found:
        ranges = zip(pairwise(found.positions), found.replicas, strict=True)
        assert max(scaling.cost(a, b, r) for (a, b), r in ranges) == found.value


def test_a_limit_within_rounding_of_the_reduced_part_ends() -> None:
    """9 × 0.1 of work whose reduced part is 0.9: replicas save one rounding, and the search must not wait for more."""
    scaling = ring([9 * 0.1, 9 * 0.1], [11 * 0.1, 9 * 0.1], [1, 2, 3, 4], longest=1)
    found = smallest_longest(scaling, 3)
    assert found
    assert (found.value, sum(found.replicas)) == brute(scaling, 2, [1, 2, 3, 4], 3)


def test_more_devices_than_help_are_left_alone() -> None:
    """Reducing 9 of gradients costs more than half of the work: replicas never pay, and one layer bounds the rest."""
    scaling = ring([4.0, 6.0, 2.0], [9.0, 9.0, 9.0], [1, 2, 4])
    assert smallest_longest(scaling, 100) == Replicated((0, 1, 2, 3), (1, 1, 1), 6.0)
    free = ring([4.0, 8.0, 4.0], [0.0, 0.0, 0.0], [1, 2, 4])
    assert smallest_longest(free, 4) == Replicated((0, 3), (4,), 4.0)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(1, 2000))
def test_scaling_all_costs_scales_the_value(works: list[int], devices: int) -> None:
    choices = [*range(1, devices + 1)]
    small, large = (
        smallest_longest(ring([w * unit for w in works], [unit] * len(works), choices), devices) for unit in (1.0, 8.0)
    )
    assert small is not None
    assert large == small._replace(value=8 * small.value)
