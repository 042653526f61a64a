"""The bounds of orders that are not known yet, against random orders of all splits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401  registers them
from autopipe.core.cluster import Link
from autopipe.core.errors import UsageError
from autopipe.core.profile import Profile
from autopipe.core.schedule import Schedule, Shape, StageMemory, StageTimes, kind, place
from autopipe.core.stage import stage_cost
from autopipe.planning.any_order import any_order_bound_s
from autopipe.planning.cases import Case
from autopipe.planning.outcome import outcome
from autopipe.planning.ranges import Ranges
from autopipe.planning.roomy import ends_of_any_order
from autopipe.planning.setting import Setting
from autopipe.planning.shares import shared_bound_s
from autopipe.simulate import simulate
from autopipe.solvers.brute import splits
from autopipe.synthesis import one_by_one, synthesize
from tests.synthetic import chain, cluster, random_schedule
from tests.test_planning import random_profile

seeds = st.integers(0, 2**32 - 1)


def drawn(rng: random.Random) -> tuple[Profile, Schedule]:
    """A small model, and an order for some split of it."""
    profile = random_profile(rng, rng.randint(2, 7))
    pieces = len(profile.legal_cuts()) + 1
    ranks = rng.randint(1, min(pieces, 3))
    stages, batches = rng.randint(ranks, min(pieces, 3 * ranks)), rng.randint(1, 6)
    return profile, random_schedule(rng, ranks=ranks, stages=stages, micro_batches=batches, in_order=rng.random() < 0.5)


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_no_order_of_any_split_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    profile, table = drawn(rng)
    ranks, batches, pieces = table.ranks, table.micro_batches, len(profile.legal_cuts()) + 1
    link, speeds = Link(rng.choice([0.0, 0.2]), rng.choice([50.0, 1e9])), [rng.choice([1.0, 2.0]) for _ in range(ranks)]
    setting = Setting(profile, cluster(ranks, link=link, speeds=speeds), "adamw", (2**40,) * ranks, {})
    ranges, seats = Ranges.of(profile, 1, optimizer="adamw"), setting.seats(ranks)
    bound_s = any_order_bound_s(setting, ranges, table.placement, batches)
    if not table.splits_backward:
        bound_s = max(bound_s, shared_bound_s(ranges, seats, table.placement, batches, splits=False))
    for positions in splits(pieces, table.stages):
        ends = [ranges.ends[position] for position in positions]
        costs = []
        for rank, (a, b) in zip(table.placement, itertools.pairwise(ends), strict=True):
            cost = stage_cost(profile, a, b, 1, speed=speeds[rank], optimizer="adamw")
            apart = [tie for tie in profile.ties if 0 < sum(a <= n < b for n in tie.layers) < len(tie.layers)]
            costs.append(replace(cost, optimizer_s=cost.optimizer_s + sum(seats.tie_s(tie) for tie in apart)))
        line = simulate(table, costs, seats.hops(table.placement), overhead_s=profile.overhead_s)
        assert line.step_s >= bound_s * (1 - 1e-9)


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_no_order_beats_the_bounds_in_the_memory_that_it_takes(seed: int) -> None:
    rng = random.Random(seed)
    profile, table = drawn(rng)
    ranks, batches, pieces = table.ranks, table.micro_batches, len(profile.legal_cuts()) + 1
    setting = Setting(profile, cluster(ranks, link=Link(0.2, 50.0)), "adamw", (2**40,) * ranks, {})
    ranges = Ranges.of(profile, 1, optimizer="adamw")
    for positions in splits(pieces, table.stages):
        made = outcome(Case.of(setting, ranges, table, 1, "none"), positions)
        just = replace(setting, limits=made.peaks)
        bound_s = any_order_bound_s(just, ranges, table.placement, batches)
        of_split = ends_of_any_order(Case.of(just, ranges, table, 1, "none"), np.array([positions], np.intp))
        assert made.step_s >= bound_s * (1 - 1e-9)
        assert made.step_s >= of_split.max(initial=0.0) * ranges.tick_s * (1 - 1e-9)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_no_order_made_for_little_memory_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    layers, ranks, batches, hop_s = rng.randint(3, 6), rng.randint(2, 3), rng.randint(1, 5), rng.choice([0.0, 0.3])
    placement = rng.choice([place("loop", ranks, 1), place("v", ranks, 2), place("loop", ranks, 2)])
    assume(len(placement) <= layers)
    seconds = [rng.choice([0.2, 1.0, rng.uniform(0.5, 4)]) for _ in range(layers)]
    profile = chain(seconds, held_bytes=[rng.choice([0, 10, rng.randint(1, 30)]) for _ in range(layers)])
    limit = rng.randint(10, 120)
    setting = Setting(profile, cluster(ranks, link=Link(hop_s, 1e18)), "sgd", (limit,) * ranks, {})
    ranges = Ranges.of(profile, 1, optimizer="sgd")
    bound_s = any_order_bound_s(setting, ranges, placement, batches)
    shape = Shape(ranks, batches, placement, tuple(0.0 if a == b else hop_s for a, b in itertools.pairwise(placement)))
    table, count = Schedule("any", placement, one_by_one(shape)), 0
    for positions in splits(layers, len(placement)):
        costs = [stage_cost(profile, a, b, 1, optimizer="sgd") for a, b in itertools.pairwise(positions)]
        forward = tuple(float(cost.held_after_forward_bytes) for cost in costs)
        input_grad = tuple(float(cost.held_after_input_grad_bytes) for cost in costs)
        memory = StageMemory(forward, input_grad, (float(limit),) * ranks)
        of_split = ends_of_any_order(Case.of(setting, ranges, table, 1, "none"), np.array([positions], np.intp))
        try:
            found = synthesize(shape, [StageTimes(*cost.times) for cost in costs], memory, tries=20)
        except UsageError:
            continue
        count += 1
        assert found.makespan_s >= bound_s * (1 - 1e-9)
        assert found.makespan_s >= of_split.max(initial=0.0) * ranges.tick_s * (1 - 1e-9)
    assume(count > 0)  # else nothing fits


def test_little_memory_by_hand() -> None:
    """Rank 0's first gradient comes after 3; in memory for one forward it waits for 2 of them, for two for 1.

    As long as that rank 1 waits for its first forward, whatever the memory.
    """
    profile = chain([1.0] * 2, held_bytes=10)
    ranges = Ranges.of(profile, 1, optimizer="sgd")

    def bound_s(limit: int) -> float:
        setting = Setting(profile, cluster(2, link=Link(0.0, 1e18)), "sgd", (limit,) * 2, {})
        return shared_bound_s(ranges, setting.seats(2), (0, 1), 8)

    assert bound_s(10) == pytest.approx(2 + 8 * 3)
    assert bound_s(20) == bound_s(10**6) == pytest.approx(1 + 8 * 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_stages_in_a_v_meet_it(ranks: int) -> None:
    """ZB-V leaves only the way to the last rank's first stage, when F, I and W take the same."""
    profile = chain([1.0] * 2 * ranks)
    setting = Setting(profile, cluster(ranks, link=Link(0.0, 1e18)), "sgd", (2**40,) * ranks, {})
    table = kind("ZB-V").schedule(ranks, 4 * ranks, stages_per_rank=2)
    costs = [stage_cost(profile, s, s + 1, 1, optimizer="sgd") for s in range(2 * ranks)]
    step_s = simulate(table, costs, [None] * (2 * ranks - 1)).step_s
    bound_s = any_order_bound_s(setting, Ranges.of(profile, 1, optimizer="sgd"), table.placement, 4 * ranks)
    assert step_s * (1 - (ranks - 1) / (24 * ranks)) <= bound_s <= step_s * (1 + 1e-9)


def test_a_heavy_head_on_its_own_rank_is_the_bound() -> None:
    """Three blocks, then a head of six: its rank waits for the first micro-batch, and then works to the end."""
    profile = chain([1.0, 1.0, 1.0, 6.0])
    setting = Setting(profile, cluster(2, link=Link(0.5, 1e18)), "sgd", (2**40,) * 2, {})
    ranges = Ranges.of(profile, 1, optimizer="sgd")
    assert any_order_bound_s(setting, ranges, (0, 1), 8) == pytest.approx(3 + 0.5 + 8 * 18)
    more = any_order_bound_s(setting, ranges, (0, 1, 0, 1), 8)  # which the head has beside another layer
    assert more == pytest.approx(1 + 0.5 + 8 * (18 + 3))


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_no_order_made_for_any_split_beats_the_bound(seed: int) -> None:
    """Random orders are far from the best ones; those that are searched for each split are near."""
    rng = random.Random(seed)
    layers, ranks, batches, hop_s = rng.randint(3, 6), rng.randint(2, 3), rng.randint(1, 4), rng.choice([0.0, 0.3])
    placement = rng.choice([place("loop", ranks, 1), place("v", ranks, 2), place("loop", ranks, 2)])
    assume(len(placement) <= layers)
    drawn = [[rng.choice([0.2, 1.0, rng.uniform(0.5, 4)]) for _ in range(layers)] for _ in range(2)]
    profile = chain(drawn[0], backward_s=drawn[1])
    setting = Setting(profile, cluster(ranks, link=Link(hop_s, 1e18)), "sgd", (2**40,) * ranks, {})
    bound_s = any_order_bound_s(setting, Ranges.of(profile, 1, optimizer="sgd"), placement, batches)
    hops_s = tuple(0.0 if a == b else hop_s for a, b in itertools.pairwise(placement))
    shape = Shape(ranks, batches, placement, hops_s)
    for positions in splits(layers, len(placement)):
        costs = [stage_cost(profile, a, b, 1, optimizer="sgd") for a, b in itertools.pairwise(positions)]
        found = synthesize(shape, [StageTimes(*cost.times) for cost in costs], StageMemory.of(shape, 1e9), tries=12)
        assert found.makespan_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize("batches", [1, 2])
def test_the_first_stages_weight_gradients_come_behind_the_last_gradient(batches: int) -> None:
    """There: 3 forwards, then F and I of each micro-batch in the last of four equal stages; back: 3 I, and the W."""
    profile = chain([1.0] * 4)
    setting = Setting(profile, cluster(4, link=Link(0.0, 1e18)), "sgd", (2**40,) * 4, {})
    shape = Shape(4, batches, (0, 1, 2, 3))
    bound_s = any_order_bound_s(setting, Ranges.of(profile, 1, optimizer="sgd"), shape.placement, batches)
    found = synthesize(shape, [StageTimes(1.0, 2.0, 1.0, 1.0)] * 4, StageMemory.of(shape, 8.0))
    assert found.makespan_s == pytest.approx(bound_s) == pytest.approx(3 + 2 * batches + 3 + 1)
