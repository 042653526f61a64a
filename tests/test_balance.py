from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.solvers.balance import smallest_longest
from autopipe.solvers.chain_dp import smallest_maximum


def both(work: list[float], stages: int) -> tuple[float | None, float | None]:
    sums = np.concatenate([[0], np.cumsum(work)])
    costs = np.where(np.triu(np.ones((len(sums), len(sums))), 1) > 0, sums[None, :] - sums[:, None], np.inf)
    found = smallest_longest(work, stages)
    expected = smallest_maximum(np.broadcast_to(costs, (stages, *costs.shape)))
    if found:
        assert len(found.positions) == stages + 1
        assert list(found.positions) == sorted(set(found.positions))
        assert max(sums[b] - sums[a] for a, b in zip(found.positions, found.positions[1:], strict=False)) == found.value
    return found and found.value, expected and expected.value


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 13))
@settings(max_examples=500)
def test_equal_to_chain_dp_on_whole_numbers(work: list[int], stages: int) -> None:
    found, expected = both([float(w) for w in work], stages)
    assert found == expected


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=40), st.integers(1, 40))
@settings(max_examples=500)
def test_equal_to_chain_dp_on_any_numbers(work: list[float], stages: int) -> None:
    found, expected = both(work, stages)
    assert found == expected


def test_the_last_stages_are_filled() -> None:
    found = smallest_longest([1, 1, 1, 1, 4], 3)
    assert found is not None
    assert found.positions == (0, 1, 4, 5) or found.value == 4
    assert smallest_longest([1.0], 2) is None
