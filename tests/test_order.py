"""The order in which a pipeline passes the devices of a cluster."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe import plan
from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.plan import FileRef, Plan
from autopipe.core.profile import Profile
from autopipe.core.schedule import kind
from autopipe.core.stage import stage_cost
from autopipe.planning.order import distinct_orders
from autopipe.planning.setting import Setting
from autopipe.simulate import simulate, simulate_plan
from tests.synthetic import chain
from tests.test_search import tiny

seeds = st.integers(0, 2**32 - 1)


def joined(devices: list[Device], tiers: tuple[Tier, ...] = (), pairs: tuple[Pair, ...] = ()) -> Cluster:
    return Cluster(
        "made by hand",
        tuple(devices),
        tiers or (Tier("all", sum(device.count for device in devices), Link(0.0, 1e9)),),
        pairs,
    )


def random_cluster(rng: random.Random, memory: int) -> Cluster:
    """Up to four devices of a few kinds; one link, two levels of it, or some pairs of their own."""
    count = rng.randint(2, 4)
    kinds = [(rng.choice([memory, 2 * memory]), rng.choice([1.0, 0.6])) for _ in range(rng.randint(1, 2))]
    devices = [Device("device", size, 1, speed) for size, speed in rng.choices(kinds, k=count)]
    slow, fast = Link(0.1, 20.0), Link(0.01, 1e3)
    how = rng.randrange(3)
    if how == 1:
        return joined(devices, (Tier("in", 2, fast), Tier("out", 4, slow)))
    some = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.5] if how == 2 else []
    return joined(devices, (Tier("all", 4, slow),), tuple(Pair(a, b, fast) for a, b in some))


def permuted(cluster: Cluster, order: tuple[int, ...]) -> Cluster:
    """The same devices and links under other numbers."""
    ranks = list(cluster.ranks())
    pairs = tuple(
        Pair(a, b, link)
        for a, b in itertools.combinations(range(len(order)), 2)
        if (link := cluster.link(order[a], order[b]))
    )
    return joined([ranks[device] for device in order], cluster.tiers, pairs)


def asked(rng: random.Random, profile: Profile) -> tuple[Cluster, dict[str, Any]]:
    needed = 4 * sum(layer.parameter_bytes for layer in profile.layers) + 400
    cluster = random_cluster(rng, rng.choice([10**9, needed // 2]))
    return cluster, {"global_batch": 4, "headroom": 0.0, "recompute": "none", "replicas": [1]}


def shortest(profile: Profile, cluster: Cluster) -> float:
    """Of all splits on all devices in all orders, with nothing of the planner in between."""
    best, devices = math.inf, list(cluster.ranks())
    for depth in range(1, len(cluster) + 1):
        for order in itertools.permutations(range(len(cluster)), depth):
            hops = [cluster.link(a, b) for a, b in itertools.pairwise(order)]
            for cuts in itertools.combinations(profile.legal_cuts(), depth - 1):
                bounds = [*itertools.pairwise([0, *cuts, len(profile.layers)])]
                for size, name in itertools.product((1, 2, 4), ("GPipe", "1F1B")):
                    costs = [
                        stage_cost(profile, *bound, size, speed=devices[device].speed)
                        for bound, device in zip(bounds, order, strict=True)
                    ]
                    line = simulate(kind(name).schedule(depth, 4 // size), costs, hops, overhead_s=profile.overhead_s)
                    limits = (devices[device].memory_bytes for device in order)
                    if all(peak <= limit for peak, limit in zip(line.peak_bytes, limits, strict=True)):
                        best = min(best, line.step_s)
    return best


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_the_best_of_all_orders_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    profile = tiny(rng)
    cluster, question = asked(rng, profile)
    best = shortest(profile, cluster)
    try:
        made = plan(profile, cluster, **question)
    except NoPlanFits:
        assert best == math.inf
        return
    assert made.predicted.step_s <= best * (1 + 1.1e-3)
    assert made.predicted.step_s >= best * (1 - 1e-9)
    assert made.lower_bound_s <= made.predicted.step_s
    again = simulate_plan(made)
    assert (again.step_s, again.peak_bytes) == (pytest.approx(made.predicted.step_s), made.predicted.peak_bytes)
    used = made.devices or range(made.depth)
    devices = list(cluster.ranks())
    assert made.memory_limit_bytes == tuple(devices[device].memory_bytes for device in used)
    for before, after, hop in zip(made.stages, made.stages[1:], made.hops, strict=False):
        assert hop == cluster.link(used[before.rank], used[after.rank])


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_numbers_of_devices_do_not_matter(seed: int) -> None:
    """However a cluster lists its devices, the step is the same, within what equal devices are not moved for."""
    rng = random.Random(seed)
    profile = tiny(rng)
    cluster, question = asked(rng, profile)
    order = tuple(rng.sample(range(len(cluster)), len(cluster)))
    found = []
    for each in (cluster, permuted(cluster, order)):
        try:
            found.append(plan(profile, each, **question).predicted.step_s)
        except NoPlanFits:
            found.append(math.inf)
    assert found[0] == pytest.approx(found[1], rel=1.1e-3)


def test_the_wide_cut_crosses_the_fast_link() -> None:
    """A cut of 100 bytes and one of 1: devices 1 and 2 have the fast link, so they hold what is around the wide one."""
    profile = chain([1.0, 1.0, 1.0], output_elements=1)
    wide = replace(profile.edges[1], shape=("b", 2500))
    profile = replace(profile, edges=(profile.edges[0], wide, profile.edges[2]))
    devices = [Device("device", 1 << 30)] * 3
    cluster = joined(devices, (Tier("slow", 3, Link(0.0, 1e4)),), (Pair(1, 2, Link(0.0, 1e9)),))
    made = plan(profile, cluster, global_batch=8, micro_batches=[1], depths=[3], schedules=["1F1B"], replicas=[1])
    assert {stage.rank for stage in made.stages[:2]} == {1, 2}
    assert made.hops[0] == Link(0.0, 1e9)
    row = next(row for row in made.rejected if row.what == "devices in their own order")
    assert row.step_s is not None
    assert row.step_s > made.predicted.step_s
    assert any("passes the ranks in the order" in note for note in made.notes)


def test_the_fast_devices_are_taken() -> None:
    devices = [Device("slow", 1 << 30, 1, 0.2), Device("fast", 1 << 30, 2, 1.0)]
    made = plan(chain([1.0] * 4), joined(devices), global_batch=8, depths=[2], replicas=[1])
    assert made.devices == (1, 2)
    assert any("for devices 1, 2 of the cluster" in note for note in made.notes)
    with pytest.raises(UsageError, match="must be 2 numbers that ascend"):
        replace(made, devices=(2, 1))


def test_the_first_stage_gets_the_large_memory() -> None:
    """It holds the most micro-batches, and only the last device has room for them."""
    profile = chain([1.0] * 3, held_bytes=100)
    devices = [Device("small", 250), Device("small", 250), Device("large", 2000)]
    made = plan(profile, joined(devices), global_batch=16, micro_batches=[1], depths=[3], replicas=[1], headroom=0.0)
    assert made.stages[0].rank == 2
    assert made.memory_limit_bytes == (250, 250, 2000)


def distinct(cluster: Cluster, depth: int) -> int:
    limits = tuple(device.memory_bytes for device in cluster.ranks())
    setting = Setting(chain([1.0]), cluster, "adamw", limits, {})
    orders = [*distinct_orders(setting, depth)]
    assert all(sorted(order) == [*range(len(cluster))] for order in orders)
    return len(orders)


def test_devices_that_are_alike_are_not_told_apart() -> None:
    one = Device("device", 1 << 30, 8)
    nodes = (Tier("in", 4, Link(0.0, 1e9)), Tier("out", 8, Link(0.0, 1e6)))
    assert distinct(joined([one]), 8) == 1
    assert distinct(joined([one], nodes), 8) == math.comb(8, 4) // 2
    other = replace(one, count=4, speed=0.5)
    assert distinct(joined([replace(one, count=4), other]), 8) == math.comb(8, 4)
    assert distinct(joined([Device("device", size) for size in (1, 2, 3, 4)]), 3) == math.perm(4, 3)


def test_many_orders_are_climbed() -> None:
    """Twelve devices of three kinds at random: far more orders than are looked at, and the step gets shorter."""
    rng = random.Random(7)
    speeds = [1.0, 0.7, 0.4] * 4
    rng.shuffle(speeds)
    devices = [Device("device", 1 << 30, 1, speed) for speed in speeds]
    links = (Tier("in", 4, Link(0.0, 1e9)), Tier("out", 12, Link(0.05, 1e3)))
    profile = chain([rng.uniform(0.5, 2) for _ in range(16)], output_elements=40)
    made = plan(
        profile,
        joined(devices, links),
        global_batch=24,
        micro_batches=[1],
        depths=[6],
        replicas=[1],
        schedules=["1F1B"],
    )
    listed = next(row for row in made.rejected if row.what == "devices in their own order")
    assert listed.step_s is not None
    assert made.predicted.step_s < 0.8 * listed.step_s
    assert Counter(made.schedule.placement).most_common(1)[0][1] == 1
    assert simulate_plan(made).step_s == pytest.approx(made.predicted.step_s)


def test_two_runs_give_equal_plans() -> None:
    rng = random.Random(5)
    profile = tiny(rng)
    cluster, question = asked(rng, profile)
    first, second = (plan(profile, cluster, profile_ref=FileRef("p"), **question) for _ in range(2))
    assert isinstance(first, Plan)
    assert first == second
