from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import UsageError
from autopipe.solvers import recomputation
from autopipe.solvers.recomputation import least_seconds


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_least_seconds_is_brute_force(layers: list[tuple[int, int]], seed: int) -> None:
    n = len(layers)
    missing = np.random.default_rng(seed).integers(-5, 20, (2, n + 1, n + 1)).astype(float)
    found = least_seconds(*(np.array(column, dtype=float) for column in zip(*layers, strict=True)), missing)
    for start, stop in product(range(n + 1), repeat=2):
        inside = layers[start:stop]
        sets = [
            (
                sum(e for (e, _), on in zip(inside, chosen, strict=True) if on),
                sum(f for (_, f), on in zip(inside, chosen, strict=True) if on),
            )
            for chosen in product((False, True), repeat=len(inside))
        ]
        for place in range(2):
            enough = [seconds for seconds, freed in sets if freed >= missing[place, start, stop]] if inside else []
            assert found[place, start, stop] == min(enough, default=np.inf)


def test_the_cheapest_layer_a_byte_is_not_always_taken() -> None:
    """6 bytes are missing. Cheapest a byte is 5 bytes for 4 s, and then 6 for 6 s more; the second alone does."""
    missing = np.full((3, 3), 6.0)
    found = least_seconds(np.array([4.0, 6.0]), np.array([5.0, 6.0]), missing)
    assert found[0, 2] == 6.0
    assert np.isinf(found[0, 1])


def test_too_many_different_layers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "_MOST", 10)
    powers = 2.0 ** np.arange(6)
    with pytest.raises(UsageError, match="too many different layers"):
        least_seconds(powers, powers, np.zeros((7, 7)))
