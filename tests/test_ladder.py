"""Look-ups of ranges with more and more recomputing layers, against the cost of each such stage."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.stage import stage_cost
from autopipe.planning.ranges import Ranges
from tests.synthetic import chain
from tests.test_planning import random_profile

seeds = st.integers(0, 2**32 - 1)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_rung_of_every_range_is_a_stage_cost(seed: int) -> None:
    profile = random_profile(random.Random(seed), 1 + seed % 9)
    ranges = Ranges.of(profile, 2, optimizer="sgd")
    ladder = ranges.ladder
    for (a, b), rung in itertools.product(
        itertools.combinations(range(len(profile.layers) + 1), 2), range(ladder.top + 1)
    ):
        where = np.array([rung]), np.array([a]), np.array([b])
        plain = stage_cost(profile, a, b, 2)
        cost = stage_cost(profile, a, b, 2, recompute=ladder.order[:rung])
        assert plain.held_after_forward_bytes - ladder.freed_in(*where)[0] == cost.held_after_forward_bytes
        extra_s = ladder.extra_in(*where)[0] * ranges.tick_s
        assert plain.backward_s + extra_s == pytest.approx(cost.backward_s, rel=1e-9)
        workspace = max(plain.workspace_bytes, ladder.workspace_in(*where)[0])
        assert workspace == cost.workspace_bytes
        most = cost.held_after_forward_bytes + cost.gradient_bytes + workspace
        assert min(ladder.first_backward_in(*where)[0], most) == cost.first_backward_bytes


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_rungs_are_found_as_by_trying_them_all(seed: int) -> None:
    rng = random.Random(seed)
    ladder = Ranges.of(random_profile(rng, 1 + seed % 9), 1, optimizer="sgd").ladder
    layers = len(ladder.layers.forward)
    begin = np.array([rng.randrange(layers) for _ in range(20)])
    end = np.array([rng.randint(a + 1, layers) for a in begin])
    missing = np.array([float(rng.randint(-100, 1500)) for _ in begin])
    rung = np.array([rng.randint(0, ladder.top) for _ in begin])
    enough, above = ladder.freeing(missing, begin, end), ladder.above(rung, begin, end)
    for n, (a, b) in enumerate(zip(begin, end, strict=True)):
        freed = [ladder.freed_in(np.array(t), np.array(a), np.array(b)) for t in range(ladder.top + 1)]
        assert enough[n] == next((t for t, amount in enumerate(freed) if amount >= missing[n]), ladder.top + 1)
        later = (t for t in range(rung[n], ladder.top) if a <= ladder.order[t] < b)
        assert above[n] == next(later, ladder.top) + 1


def test_the_cheapest_for_each_byte_come_first() -> None:
    """The last layer keeps what it holds; of the others the second is cheapest, and the third holds half as much."""
    profile = chain([3.0, 1.0, 1.0, 0.5], held_bytes=[1000, 1000, 500, 1000], output_elements=0)
    assert Ranges.of(profile, 1, optimizer="sgd").ladder.order == (1, 2, 0)
