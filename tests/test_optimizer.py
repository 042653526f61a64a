"""What optimizers keep: master weights, state that replicas share out; and plans with them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.cluster import Link
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.optimizer import PASSES, Optimizer
from autopipe.core.plan import Plan
from autopipe.core.profile import OPTIMIZER_STATE, Layer, Profile
from autopipe.core.schedule import kind
from autopipe.core.stage import stage_cost
from autopipe.planning.ranges import Ranges
from autopipe.report.terminal import plan_text
from autopipe.search import plan
from autopipe.simulate import simulate, simulate_plan
from tests.synthetic import cluster
from tests.test_planning import random_profile
from tests.test_search import tiny

SHORT = Layer("short", 2_000_000, 1_000_000)
"""A million parameters of 16 bits."""


def halved(profile: Profile) -> Profile:
    """The profile of a model of 16 bits with as many bytes."""
    layers = tuple(replace(layer, parameters=layer.parameter_bytes // 2) for layer in profile.layers)
    return replace(profile, layers=layers, dtype="bfloat16")


def test_adam_keeps_twelve_bytes_for_a_parameter_of_two() -> None:
    """2 + 2 + K bytes a parameter, K = 12: section 3.1 of ZeRO."""
    assert Optimizer("adamw").state_bytes(SHORT) == 4_000_000
    assert Optimizer("adamw", master_weights=True).state_bytes(SHORT) == 12_000_000
    assert Optimizer("adamw", master_weights=True, shards=4).state_bytes(SHORT) == 3_000_000
    assert Optimizer("sgd", master_weights=True).state_bytes(SHORT) == 4_000_000


@given(
    name=st.sampled_from(sorted(OPTIMIZER_STATE)),
    short=st.integers(0, 1000),
    single=st.integers(0, 1000),
    shards=st.integers(1, 5),
)
def test_parameters_of_32_bits_have_no_copy(name: str, short: int, single: int, shards: int) -> None:
    layer = Layer("mixed", 2 * short + 4 * single, short + single)
    state = OPTIMIZER_STATE[name] * (4 * short + 4 * single) + 4 * short
    assert Optimizer(name, master_weights=True, shards=shards).state_bytes(layer) == -(-state // shards)
    assert Optimizer(name, shards=shards).state_bytes(layer) == -(
        -OPTIMIZER_STATE[name] * layer.parameter_bytes // shards
    )


def test_frozen_parameters_have_no_state() -> None:
    half = replace(SHORT, trainable_bytes=1_000_000)
    assert Optimizer("adamw", master_weights=True).state_bytes(half) == 6_000_000
    assert Optimizer("adamw", master_weights=True).state_bytes(replace(SHORT, trainable_bytes=0)) == 0


def test_a_step_on_copies_moves_what_they_are_longer() -> None:
    """20 passes over 4 bytes instead of 2, and once gradient (2, 4), copy (4) and parameter (2)."""
    assert Optimizer("adamw").step_part(SHORT) == 1
    assert Optimizer("adamw", shards=4).step_part(SHORT) == 1 / 4
    assert Optimizer("adamw", master_weights=True).step_part(SHORT) == (20 * 4 + 12) / (20 * 2)
    assert set(PASSES) == set(OPTIMIZER_STATE)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="optimizer 'lion' is not known: use one of sgd"):
        Optimizer("lion")


@pytest.mark.parametrize(
    "update", [Optimizer("adam", True), Optimizer("adamw", True, 3), Optimizer("momentum", False, 2)]
)
@pytest.mark.parametrize("seed", range(6))
def test_ranges_are_stage_costs(update: Optimizer, seed: int) -> None:
    """Every range's bytes and seconds, tied parameters included, are what stage_cost says of it."""
    profile = halved(random_profile(random.Random(seed), 6))
    ranges = Ranges.of(profile, 1, optimizer=update)
    for a, start in enumerate(ranges.ends):
        for b, stop in enumerate(ranges.ends[a + 1 :], a + 1):
            cost = stage_cost(profile, start, stop, 1, optimizer=update)
            assert ranges.static[a, b] == cost.static_bytes
            assert ranges.optimizer[a, b] * ranges.tick_s == pytest.approx(cost.optimizer_s, rel=1e-6, abs=1e-9)


def made(devices: int, **choices: object) -> tuple[Profile, Plan]:
    profile = halved(random_profile(random.Random(3), 8))
    return profile, plan(profile, cluster(devices, link=Link(1e-5, 1e9)), global_batch=8, depths=[2], **choices)  # type: ignore[arg-type]


def test_a_plan_counts_the_state_and_what_is_handed_round() -> None:
    profile, whole = made(4, replicas=[2], micro_batches=[1])
    _, shared = made(4, replicas=[2], micro_batches=[1], master_weights=True, shard_optimizer=True)
    assert (shared.master_weights, shared.sharded_optimizer) == (True, True)
    assert shared.update == Optimizer("adamw", True, 2)
    for stage in shared.stages:
        layers = profile.layers[stage.start : stage.stop]
        assert stage.costs.optimizer_bytes == sum(map(shared.update.state_bytes, layers))
        ring = 2 * (1e-5 + stage.costs.gradient_bytes / 2 / 1e9)  # two messages of half of the gradients
        assert stage.costs.reduce_s == pytest.approx(1.5 * ring)
    assert " ".join(plan_text(shared).split()).count("global batch 8 · master weights · shared optimizer") == 1
    assert "shared optimizer" not in plan_text(whole)
    assert simulate_plan(shared).step_s == pytest.approx(shared.predicted.step_s)
    assert shared.lower_bound_s <= shared.predicted.step_s * (1 + 1e-9)
    assert simulate_plan(whole).peak_bytes == whole.predicted.peak_bytes
    assert simulate_plan(shared).peak_bytes == shared.predicted.peak_bytes


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_best_of_everything_by_brute_force(seed: int) -> None:
    """With replicas that may share out the state, over one link; nothing of the planner in between."""
    rng = random.Random(seed)
    link = Link(rng.choice([0.0, 0.1]), rng.choice([1e3, 30.0]))
    profile, limit = halved(tiny(rng)), rng.choice([10**9, rng.randint(500, 4000)])
    masters, shared = rng.choice([True, False]), rng.choice([True, True, False])
    best = float("inf")
    for replicas, depth, size, name in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4), ("GPipe", "1F1B")):
        if replicas * depth > 4 or 4 % (size * replicas):
            continue
        update = Optimizer("adamw", masters, replicas if shared else 1)
        for cuts in itertools.combinations(profile.legal_cuts(), depth - 1):
            costs = []
            for start, stop in itertools.pairwise([0, *cuts, len(profile.layers)]):
                cost = stage_cost(profile, start, stop, size, optimizer=update)
                rounds = (replicas - 1) * (3 if shared else 2)
                ring_s = rounds * (link.latency_s + cost.gradient_bytes / replicas / link.bytes_per_s)
                costs.append(replace(cost, reduce_s=ring_s if cost.gradient_bytes else 0.0))
            table = kind(name).schedule(depth, 4 // size // replicas)
            line = simulate(table, costs, [link] * (depth - 1), overhead_s=profile.overhead_s)
            if max(line.peak_bytes) <= limit:
                best = min(best, line.step_s)
    asked = {"memory_bytes": limit, "headroom": 0.0, "recompute": "none", "replicas": [1, 2, 4]}
    asked |= {"master_weights": masters, "shard_optimizer": shared, "global_batch": 4}
    try:
        found = plan(profile, cluster(4, link=link), **asked)  # type: ignore[arg-type]
    except NoPlanFits:
        assert best == float("inf")
        return
    assert found.predicted.step_s == pytest.approx(best, rel=1e-9)
    assert found.lower_bound_s <= found.predicted.step_s
    again = simulate_plan(found)
    assert (again.step_s, again.peak_bytes) == (pytest.approx(found.predicted.step_s), found.predicted.peak_bytes)


def test_shared_state_fits_where_whole_state_does_not() -> None:
    profile = halved(random_profile(random.Random(3), 8))
    total = sum(layer.parameter_bytes for layer in profile.layers)
    costs = tuple(
        replace(table, layers=tuple(replace(c, held_after_forward_bytes=0, workspace_bytes=0) for c in table.layers))
        for table in profile.costs
    )
    light = replace(profile, costs=costs, ties=())
    room = cluster(2, memory_bytes=6 * total)
    asked = {"global_batch": 8, "replicas": [2], "master_weights": True, "headroom": 0.0, "recompute": "none"}
    with pytest.raises(NoPlanFits, match=r"Try .*--shard-optimizer\.$"):
        plan(light, room, **asked)  # type: ignore[arg-type]
    fits = plan(light, room, shard_optimizer=True, **asked)  # type: ignore[arg-type]
    assert max(fits.predicted.peak_bytes) <= 6 * total


def test_master_weights_of_a_float32_model_are_refused() -> None:
    profile = random_profile(random.Random(1), 4)
    with pytest.raises(UsageError, match="is float32: plan without"):
        plan(profile, cluster(2), global_batch=8, master_weights=True)


def test_one_replica_shares_nothing() -> None:
    profile = random_profile(random.Random(2), 5)
    alone = plan(profile, cluster(2), global_batch=8, replicas=[1])
    asked = plan(profile, cluster(2), global_batch=8, replicas=[1], shard_optimizer=True)
    assert replace(asked, sharded_optimizer=False) == alone
