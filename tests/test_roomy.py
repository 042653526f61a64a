"""Cuts that leave orders room: their bound against orders that were searched, and all splits of small chains."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.cluster import Link
from autopipe.core.schedule import Schedule, Shape, StageMemory, StageTimes, place
from autopipe.core.stage import stage_cost
from autopipe.planning.cases import Case
from autopipe.planning.ranges import Ranges
from autopipe.planning.roomy import ends_of_any_order, roomy
from autopipe.planning.setting import Setting
from autopipe.solvers.brute import splits
from autopipe.synthesis import one_by_one, synthesize
from tests.synthetic import chain, cluster

seeds = st.integers(0, 2**32 - 1)


def case(seconds: list[list[float]], shape: Shape, hop_s: float) -> Case:
    """A chain by F and B, on ranks with memory for all."""
    profile = chain(seconds[0], backward_s=seconds[1])
    setting = Setting(profile, cluster(shape.ranks, link=Link(hop_s, 1e18)), "sgd", (2**40,) * shape.ranks, {})
    table = Schedule("any", shape.placement, one_by_one(shape))
    return Case.of(setting, Ranges.of(profile, 1, optimizer="sgd"), table, 1, "none")


def drawn(seed: int) -> tuple[Case, Shape]:
    """Uneven layers, a shape, and the case of both."""
    rng = random.Random(seed)
    ranks, hop_s = rng.randint(2, 3), rng.choice([0.0, 0.3])
    placement = rng.choice([place("loop", ranks, 1), place("v", ranks, 2), place("loop", ranks, 2)])
    layers = rng.randint(len(placement), len(placement) + 3)
    hops_s = tuple(0.0 if a == b else hop_s for a, b in pairwise(placement))
    shape = Shape(ranks, rng.randint(1, 4), placement, hops_s)
    seconds = [[rng.choice([0.2, 1.0, rng.uniform(0.5, 4)]) for _ in range(layers)] for _ in range(2)]
    return case(seconds, shape, hop_s), shape


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_no_order_beats_the_bound_of_a_split(seed: int) -> None:
    made, shape = drawn(seed)
    every = np.array([*splits(made.ranges.pieces, made.parts)][:5], np.intp)
    for positions, end in zip(every.tolist(), ends_of_any_order(made, every).tolist(), strict=True):
        costs = [stage_cost(made.setting.profile, a, b, 1, optimizer="sgd") for a, b in pairwise(positions)]
        times = [StageTimes(*cost.times) for cost in costs]
        found = synthesize(shape, times, StageMemory.of(shape, 1e9), tries=6)
        assert found.makespan_s >= end * made.ranges.tick_s * (1 - 1e-9)


def test_moving_cuts_mostly_finds_the_roomiest_of_all_splits() -> None:
    """It is not promised to; but it never ends with a worse one than it began with, and names each split once."""
    reached = 0
    for seed in range(50):
        made, _ = drawn(seed)
        every = np.array([*splits(made.ranges.pieces, made.parts)], np.intp)
        ends = ends_of_any_order(made, every)
        found = roomy(made, [tuple(every[0].tolist())])
        first = ends_of_any_order(made, np.array(found[:1], np.intp))
        assert ends.min() <= first[0] <= ends[0]
        assert found == [*dict.fromkeys(found)]
        reached += first[0] == ends.min()
    assert reached >= 49  # all; with single moves alone, or from one split at a time, 45 and 46


def test_equal_blocks_before_a_heavy_head_by_hand() -> None:
    """The head waits for three forwards, then works without a pause; of a V a rank has all that its stages have."""
    shape = Shape(2, 4, (0, 1))
    made = case([[1.0, 1.0, 1.0, 6.0], [2.0, 2.0, 2.0, 12.0]], shape, 0.0)
    assert ends_of_any_order(made, np.array([[0, 3, 4]])) * made.ranges.tick_s == pytest.approx([3 + 4 * 18])
    assert roomy(made, [(0, 1, 4)])[0] == (0, 3, 4)
