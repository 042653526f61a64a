"""How many forwards fit together, against taking them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.planning.needs import fitting_forwards

sizes = st.one_of(st.just(0.0), st.floats(0.1, 9))
parts = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5)


def one_by_one(room: float, kinds: list[tuple[float, float]], micro_batches: int) -> float:
    """The ticks of forwards taken in turn, the densest first, until the room is full."""
    left, ticks = max(room, 0.0), 0.0
    for held, forward in sorted(kinds, key=lambda kind: -kind[1] / kind[0] if kind[0] else -np.inf):
        for _ in range(micro_batches):
            part = min(1.0, left / held) if held else 1.0
            left, ticks = left - part * held, ticks + part * forward
    return ticks


@given(st.floats(-5, 60), parts, st.integers(1, 4))
def test_the_forwards_that_fit_are_those_taken_one_by_one(
    room: float, kinds: list[tuple[float, float]], micro_batches: int
) -> None:
    held, forward = np.array(kinds)[:, :, None].transpose(1, 0, 2)
    found = fitting_forwards(np.array([room]), held, forward, micro_batches)
    assert found[0] == pytest.approx(one_by_one(room, kinds, micro_batches), abs=1e-9)


def test_what_takes_no_memory_fits_where_there_is_none() -> None:
    held, forward = np.array([[0.0], [2.0]]), np.array([[3.0], [5.0]])
    assert fitting_forwards(np.array([0.0]), held, forward, 2)[0] == 6.0
    assert fitting_forwards(np.array([3.0]), held, forward, 2)[0] == 6.0 + 1.5 * 5.0
