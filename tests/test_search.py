from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

import autopipe.core.schedule as core_schedule
from autopipe import plan
from autopipe.baselines import BASELINES
from autopipe.core.cluster import Cluster, Link
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.files import from_json, to_json, write
from autopipe.core.plan import FileRef, ModelRef, Plan
from autopipe.core.profile import OPTIMIZER_STATE, Jitter, Profile, Tie
from autopipe.core.schedule import Op, Order, Shape, StageTimes, kind, kinds
from autopipe.core.stage import stage_cost
from autopipe.core.timeline import Timeline
from autopipe.core.validation import validate
from autopipe.simulate import simulate
from tests.synthetic import GIB, chain, cluster

seeds = st.integers(0, 2**32 - 1)
SLOW = Link(0.01, 1e9)


pipelined = partial(plan, replicas=[1])
"""The search without replicas, which are faster where gradients are small."""


def simulated(profile: Profile, devices: Cluster, name: str, batches: int, size: int, cuts: Sequence[int]) -> Timeline:
    """A split's Timeline from the profile, with nothing of the planner in between."""
    ends = [0, *cuts, len(profile.layers)]
    costs = [stage_cost(profile, a, b, size) for a, b in itertools.pairwise(ends)]
    hops = [devices.link(rank, rank + 1) for rank in range(len(cuts))]
    return simulate(kind(name).schedule(len(costs), batches), costs, hops, overhead_s=profile.overhead_s)


def again(made: Plan) -> Timeline:
    """The plan's own Timeline, from what is in it."""
    costs = [stage.costs for stage in made.stages]
    return simulate(made.schedule.parsed(), costs, made.hops, overhead_s=made.overhead_s)


def tiny(rng: random.Random) -> Profile:
    pool = [rng.uniform(0.5, 3) for _ in range(rng.randint(1, 4))]
    count = rng.randint(2, 5)
    profile = chain(
        [rng.choice(pool) for _ in range(count)],
        parameter_bytes=[4 * rng.randint(0, 99) for _ in range(count)],
        held_bytes=[rng.randint(1, 99) for _ in range(count)],
        output_elements=rng.randint(1, 9),
        micro_batches=(1, 2, 4),
        optimizer_s=rng.choice([0.0, 0.2]),
        overhead_s=rng.choice([0.0, 0.05]),
        legal=[rng.random() < 0.9 for _ in range(count)],
    )
    # larger micro-batches are a little cheaper a sample, as on a real device
    tables = tuple(
        replace(
            table,
            layers=tuple(
                replace(cost, forward_s=cost.forward_s * 0.9 ** (table.micro_batch - 1)) for cost in table.layers
            ),
        )
        for table in profile.costs
    )
    return replace(profile, costs=tables)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_the_best_of_everything_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    profile, devices = tiny(rng), cluster(3, link=Link(rng.choice([0.0, 0.1, 2.0]), 1e3))
    limit = rng.choice([10**9, rng.randint(500, 4000)])
    best = float("inf")
    for depth, size, name in itertools.product((1, 2, 3), (1, 2, 4), ("GPipe", "1F1B")):
        for cuts in itertools.combinations(profile.legal_cuts(), depth - 1):
            line = simulated(profile, devices, name, 4 // size, size, cuts)
            if max(line.peak_bytes) <= limit:
                best = min(best, line.step_s)
    try:
        asked = {"memory_bytes": limit, "headroom": 0.0, "recompute": "none", "replicas": [1]}
        made = plan(profile, devices, global_batch=4, **asked)  # type: ignore[arg-type]
    except NoPlanFits:
        assert best == float("inf")
        return
    assert made.predicted.step_s == pytest.approx(best, rel=1e-9)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_the_best_of_everything_with_replicas_by_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    link = Link(rng.choice([0.0, 0.1]), rng.choice([1e3, 30.0]))
    profile, devices = tiny(rng), cluster(4, link=link)
    limit = rng.choice([10**9, rng.randint(500, 4000)])
    best = float("inf")
    for replicas, depth, size, name in itertools.product((1, 2, 4), (1, 2, 3, 4), (1, 2, 4), ("GPipe", "1F1B")):
        if replicas * depth > 4 or 4 % (size * replicas):
            continue
        for cuts in itertools.combinations(profile.legal_cuts(), depth - 1):
            line = replicated(profile, devices, name, 4 // size // replicas, size, cuts, replicas)
            if max(line.peak_bytes) <= limit:
                best = min(best, line.step_s)
    asked = {"memory_bytes": limit, "headroom": 0.0, "recompute": "none", "replicas": [1, 2, 4]}
    try:
        made = plan(profile, devices, global_batch=4, **asked)  # type: ignore[arg-type]
    except NoPlanFits:
        assert best == float("inf")
        return
    assert made.predicted.step_s == pytest.approx(best, rel=1e-9)
    assert made.lower_bound_s <= made.predicted.step_s
    line = again(made)
    assert (line.step_s, line.idle, line.peak_bytes) == (
        pytest.approx(made.predicted.step_s), made.predicted.idle, made.predicted.peak_bytes,
    )  # fmt: skip


def replicated(
    profile: Profile, devices: Cluster, name: str, batches: int, size: int, cuts: Sequence[int], replicas: int
) -> Timeline:
    """As ``simulated``, with what a ring over the one link takes to average the gradients."""
    ends = [0, *cuts, len(profile.layers)]
    link, rounds = devices.tiers[0].link, 2 * (replicas - 1)
    costs = []
    for a, b in itertools.pairwise(ends):
        cost = stage_cost(profile, a, b, size)
        ring_s = rounds * (link.latency_s + cost.gradient_bytes / replicas / link.bytes_per_s)
        costs.append(replace(cost, reduce_s=ring_s if cost.gradient_bytes else 0.0))
    hops = [devices.link(rank, rank + 1) for rank in range(len(cuts))]
    return simulate(kind(name).schedule(len(costs), batches), costs, hops, overhead_s=profile.overhead_s)


def test_data_parallelism_where_gradients_are_small() -> None:
    made = plan(chain([1.0] * 4), cluster(4), global_batch=8)
    assert (made.depth, made.replicas, made.micro_batches, len(made.stages)) == (1, 4, 2, 1)
    assert made.predicted.step_s == pytest.approx(2 * 12)
    heavy_gradients = chain([1.0] * 4, parameter_bytes=10**6)
    other = plan(heavy_gradients, cluster(4, link=Link(0.0, 1e5)), global_batch=8)
    assert (other.depth, other.replicas) == (4, 1)
    rows = {name: row.reason for row in other.rejected for name in row.names}
    assert {"2 replicas", "4 replicas", "data parallelism, no pipeline"} <= rows.keys()


def test_averaging_gradients_can_be_the_limit() -> None:
    made = plan(chain([1.0], parameter_bytes=100), cluster(2, link=Link(9.0, 100.0)), global_batch=2, replicas=[2])
    assert made.stages[0].costs.reduce_s == 2 * (9.0 + 50 / 100.0)
    assert made.predicted.step_s == 3 + 19
    assert made.limited_by == "averaging gradients over 2 replicas"


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_what_every_plan_promises(seed: int) -> None:
    rng = random.Random(seed)
    profile, devices = tiny(rng), cluster(rng.randint(1, 4), link=Link(rng.choice([0.0, 0.1, 2.0]), 1e3))
    limit = rng.choice([10**9, rng.randint(1000, 4000)])
    try:
        made = plan(profile, devices, global_batch=8, memory_bytes=limit)
    except NoPlanFits:
        reject()
    validate(made.schedule.parsed())
    line = again(made)
    assert (line.step_s, line.idle, line.peak_bytes) == (
        made.predicted.step_s, made.predicted.idle, made.predicted.peak_bytes,
    )  # fmt: skip
    assert made.predicted.samples_per_s == pytest.approx(8 / line.step_s)
    assert all(peak <= most for peak, most in zip(line.peak_bytes, made.memory_limit_bytes, strict=True))
    assert made.memory_limit_bytes == (int(limit * 0.95),) * made.depth
    assert made.gap >= 0
    assert made.lower_bound_s <= made.predicted.step_s
    assert made.gap == pytest.approx(made.predicted.step_s / made.lower_bound_s - 1)
    for row in made.rejected:
        assert row.step_s is not None
        assert row.step_s >= made.predicted.step_s * (1 - 1e-9) or "limit on rank" in row.reason
    assert from_json(to_json(made), Plan) == made


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_never_slower_than_a_baseline_that_fits(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(8, 24)  # too many splits to try them all
    profile = chain(
        [rng.uniform(0.5, 3) for _ in range(count)],
        parameter_bytes=[4 * rng.randint(1, 99) for _ in range(count)],
        held_bytes=[rng.randint(1, 99) for _ in range(count)],
        micro_batches=(1, 2),
    )
    devices = cluster(5, link=Link(0.1, 1e3))
    limit = rng.choice([10**9, rng.randint(count * 250, count * 600)])
    try:
        made = plan(profile, devices, global_batch=8, memory_bytes=limit, headroom=0)
    except NoPlanFits:
        made = None
    for depth, size, name in itertools.product((1, 2, 5), (1, 2), ("GPipe", "1F1B")):
        for rule in BASELINES.values():
            cuts = rule(profile, depth)
            if cuts is None:
                continue  # the rule knows no such model, or no such depth
            line = simulated(profile, devices, name, 8 // size, size, cuts)
            if max(line.peak_bytes) <= limit:
                assert made is not None
                assert made.predicted.step_s <= line.step_s * (1 + 1e-9)


@given(seeds, st.sampled_from([0.001, 3.0, 7e5]))
@settings(max_examples=30, deadline=None)
def test_scaling_all_costs_scales_the_step_and_nothing_else(seed: int, factor: float) -> None:
    profile = tiny(random.Random(seed))
    link, rate = 0.1, 1e3
    scaled = replace(
        profile,
        overhead_s=profile.overhead_s * factor,
        costs=tuple(
            replace(
                table,
                layers=tuple(
                    replace(
                        cost,
                        forward_s=cost.forward_s * factor,
                        backward_s=cost.backward_s * factor,
                        input_grad_s=cost.input_grad_s * factor,
                        weight_grad_s=cost.weight_grad_s * factor,
                        optimizer_s=cost.optimizer_s * factor,
                    )
                    for cost in table.layers
                ),
            )
            for table in profile.costs
        ),
    )
    limit = sum(4 * layer.parameter_bytes for layer in profile.layers) // 2 + 2000
    try:
        one = plan(profile, cluster(3, link=Link(link, rate)), global_batch=8, memory_bytes=limit)
    except NoPlanFits:
        with pytest.raises(NoPlanFits):
            plan(scaled, cluster(3, link=Link(link * factor, rate / factor)), global_batch=8, memory_bytes=limit)
        return
    other = plan(scaled, cluster(3, link=Link(link * factor, rate / factor)), global_batch=8, memory_bytes=limit)
    assert other.predicted.step_s == pytest.approx(one.predicted.step_s * factor, rel=1e-9)
    assert other.lower_bound_s == pytest.approx(one.lower_bound_s * factor, rel=1e-9)
    assert (other.cuts, other.schedule, other.micro_batch) == (one.cuts, one.schedule, one.micro_batch)
    assert [row.reason for row in other.rejected] == [row.reason for row in one.rejected]
    assert other.limited_by == one.limited_by


@pytest.mark.parametrize(("layers", "depth"), [(7, 3), (10, 4), (11, 3)])
def test_equal_layers_tie_whatever_the_unit(layers: int, depth: int) -> None:
    """Thirds of a second do not add up exactly; the choice among equal splits must not depend on that."""
    units = [1.0, *(k / 3 for k in range(1, 8)), *(k * 0.1 for k in range(1, 8)), 7e-5, 1.1e-3]
    plans = [plan(chain([unit] * layers), cluster(depth), global_batch=8, depths=[depth]) for unit in units]
    assert len({made.cuts for made in plans}) == 1


# memory -------------------------------------------------------------------------------------------------------------


def heavy() -> Profile:
    return chain(
        [0.1, *[1.0] * 8, 2.6],
        parameter_bytes=GIB // 8,
        held_bytes=GIB // 8,
        micro_batches=(1, 2, 4),
        output_elements=1000,
    )


def test_a_limit_between_two_plans_changes_the_choice() -> None:
    free = pipelined(heavy(), cluster(4, link=SLOW), global_batch=16, recompute="none")
    limit = max(free.predicted.peak_bytes) - 1
    tight = pipelined(heavy(), cluster(4, link=SLOW), global_batch=16, recompute="none", memory_bytes=limit, headroom=0)
    assert max(tight.predicted.peak_bytes) <= limit
    assert tight.predicted.step_s > free.predicted.step_s
    assert (tight.cuts, tight.schedule.name) != (free.cuts, free.schedule.name)


def test_recomputation_only_where_it_is_needed() -> None:
    free = pipelined(heavy(), cluster(4, link=SLOW), global_batch=16)
    assert not any(stage.recompute for stage in free.stages)
    limit = max(free.predicted.peak_bytes) - 1
    auto, every, nothing = (
        pipelined(heavy(), cluster(4, link=SLOW), global_batch=16, memory_bytes=limit, headroom=0, recompute=rule)
        for rule in ("auto", "all", "none")
    )
    assert [stage.recompute for stage in auto.stages] == [("layers.0",), (), (), ()]
    assert [n for stage in every.stages for n in stage.recompute] == [layer.name for layer in heavy().layers[:-1]]
    assert auto.predicted.step_s < nothing.predicted.step_s
    assert auto.predicted.step_s < every.predicted.step_s
    assert "1 layer recomputes its activations to fit, 0.9 % of the forward" in auto.notes


def test_memory_is_named_when_more_of_it_would_help() -> None:
    tight = plan(heavy(), cluster(4, link=SLOW), global_batch=16, memory_bytes=int(2.4 * GIB))
    assert tight.limited_by.startswith("memory on rank")


def test_no_plan_fits_says_how_much_and_what_to_try() -> None:
    with pytest.raises(NoPlanFits) as caught:
        plan(heavy(), cluster(2), global_batch=16, micro_batches=[4], recompute="none", memory_bytes=4 * GIB)
    assert str(caught.value) == (
        "no plan fits: the smallest needs 6.00 GiB on rank 1, the limit is 3.80 GiB, "
        "4.00 GiB less a headroom of 5.0 % (weights, gradients and optimizer 3.00 GiB, activations 3.00 GiB). "
        "Try --micro-batch 1, --recompute auto or --devices 7."
    )


TRIES = {
    "--micro-batch": ("micro_batches", lambda text: [int(text)]),
    "--recompute": ("recompute", str),
    "--devices": ("devices", int),
    "--depth": ("depths", lambda text: [int(text)]),
    "--schedule": ("schedules", lambda text: [text]),
}


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_what_it_says_to_try_helps(seed: int) -> None:
    rng = random.Random(seed)
    asked: dict[str, object] = {
        "global_batch": 16,
        "micro_batches": rng.choice([None, [4], [2, 4]]),
        "recompute": rng.choice(["none", "auto", "all"]),
        "memory_bytes": int(rng.uniform(1, 7) * GIB),
        "devices": rng.randint(1, 4),
        "schedules": rng.choice([None, ["GPipe"]]),
        "depths": rng.choice([None, [1]]),
    }
    try:
        plan(heavy(), cluster(16), **asked)  # type: ignore[arg-type]
    except NoPlanFits as error:
        message = str(error)
    else:
        reject()
    assert ("Try --" in message) != ("No other setting" in message)
    for option, value in re.findall(r"(--[a-z-]+) (\w+)", message):
        name, parse = TRIES[option]
        assert plan(heavy(), cluster(16), **(asked | {name: parse(value)}))  # type: ignore[arg-type]
    if "--shard-optimizer" in message:
        assert plan(heavy(), cluster(16), shard_optimizer=True, **asked)  # type: ignore[arg-type]


def test_no_plan_fits_names_only_what_was_not_tried() -> None:
    with pytest.raises(NoPlanFits, match=r"activations [\d.]+ \w+\)\. No other setting fits either"):
        plan(chain([1.0, 1.0], parameter_bytes=GIB), cluster(2), global_batch=4, memory_bytes=GIB)
    asked = {"depths": [3], "schedules": ["GPipe"], "memory_bytes": 6 * GIB}
    with pytest.raises(NoPlanFits, match=r"Try --recompute auto or --schedule 1F1B\.$"):
        plan(heavy(), cluster(4), global_batch=16, recompute="none", **asked)  # type: ignore[arg-type]
    with pytest.raises(NoPlanFits, match=r"Try --depth 2 or --shard-optimizer\.$"):
        plan(heavy(), cluster(4), global_batch=16, depths=[1], memory_bytes=4 * GIB)


def test_a_smaller_micro_batch_is_worth_profiling() -> None:
    profile = chain([1.0] * 2, held_bytes=GIB, micro_batches=(4,))
    with pytest.raises(NoPlanFits, match=r"needs 8\.00 GiB .* Try --micro-batch 1 or --devices 2\.$"):
        plan(profile, cluster(1), global_batch=4, memory_bytes=7 * GIB, recompute="none", headroom=0)


def test_optimizer_state_is_counted() -> None:
    peaks = {
        name: plan(chain([1.0], parameter_bytes=1000), cluster(1), global_batch=1, optimizer=name).predicted.peak_bytes
        for name in OPTIMIZER_STATE
    }
    assert peaks == {"sgd": (2000,), "momentum": (3000,), "adam": (4000,), "adamw": (4000,)}


# what wins ----------------------------------------------------------------------------------------------------------


def test_no_pipeline_where_links_are_slow() -> None:
    made = plan(heavy(), cluster(4, link=Link(50.0, 1e9)), global_batch=4)
    assert made.depth == 1
    assert made.limited_by == "no pipeline is faster"
    assert made.notes[0].startswith("1 of 4 devices is used, which is fastest: 4 stages would take ")
    assert made.hops == ()


def test_fewer_devices_where_the_head_decides() -> None:
    """The head takes longer than all else: a third device cannot help."""
    made = pipelined(chain([1.0, 1.0, 1.0, 3.1]), cluster(4, link=Link(0.01, 1e9)), global_batch=64)
    assert made.depth == 2
    assert made.cuts == (3,)
    assert made.limited_by == "stage 1, layers.3 alone"
    assert "2 of 4 devices are used" in made.notes[0]


def test_the_optimizer_can_be_the_limit() -> None:
    assert plan(chain([1.0, 1.0], optimizer_s=50.0), cluster(2), global_batch=2).limited_by == "the optimizer"


def test_links_and_filling_can_be_the_limit() -> None:
    slow = plan(chain([1.0, 1.0]), cluster(2, link=Link(9.0, 1e9)), global_batch=2, depths=[2])
    assert slow.limited_by == "the links"
    short = plan(chain([1.0] * 4), cluster(4), global_batch=1, depths=[4])
    assert short.limited_by == "filling and draining 4 stages, 1 micro-batch"


def test_faster_devices_take_more_layers() -> None:
    made = plan(chain([1.0] * 12), cluster(2, speeds=[1.0, 3.0]), global_batch=64, depths=[2])
    assert made.cuts == (3,)


def test_schedules_are_listed_where_copies_of_the_model_are_the_plan() -> None:
    made = plan(chain([1.0, 1.0]), cluster(2), global_batch=2, schedules=["1F1B", "GPipe", "ZB-H1"])
    assert (made.depth, made.replicas) == (1, 2)
    rows = {name: row for row in made.rejected for name in row.names}
    assert all(rows[name].step_s > made.predicted.step_s for name in ("1F1B", "GPipe", "ZB-H1"))


def test_rejected_lists_every_alternative() -> None:
    made = pipelined(heavy(), cluster(4, link=SLOW), global_batch=16)
    assert [name for row in made.rejected for name in row.names] == [
        "equal layers, 1F1B", "equal parameters, 1F1B", "torchtitan's split, 1F1B", "GPipe's split, 1F1B",
        "PipeDream's split, 1F1B", "GPipe", "2 stages", "3 stages", "micro-batch 2", "micro-batch 4",
        "one device, no pipeline",
    ]  # fmt: skip
    assert {name: row.reason for row in made.rejected for name in row.names}["one device, no pipeline"] == "+209.2 %"
    layers = simulated(heavy(), cluster(4, link=SLOW), "1F1B", 16, 1, BASELINES["equal layers"](heavy(), 4) or ())
    assert (made.rejected[0].step_s, made.rejected[0].peak_bytes) == (layers.step_s, max(layers.peak_bytes))


def test_what_was_not_asked_for_may_be_faster_and_says_so() -> None:
    made = plan(heavy(), cluster(4, link=Link(50.0, 1e9)), global_batch=4, depths=[4])
    one = next(row for row in made.rejected if "one device, no pipeline" in row.names)
    assert one.step_s is not None
    assert one.step_s < made.predicted.step_s
    assert one.reason.endswith(" %, but not asked for")


def test_ways_to_the_same_plan_are_one() -> None:
    made = plan(chain([1.0] * 4), cluster(2), global_batch=4, depths=[2], replicas=[1])
    same = next(row for row in made.rejected if row.what == "equal layers, 1F1B")
    assert (made.cuts, same.reason) == ((2,), "the same cuts")
    assert {"GPipe's split, 1F1B", "PipeDream's split, 1F1B"} <= {*same.also}
    names = [name for row in made.rejected for name in row.names]
    assert len(set(names)) == len(names)
    rows = [(row.step_s, row.idle, row.peak_bytes, row.reason) for row in made.rejected]
    assert len(set(rows)) == len(rows)


def test_what_the_request_leaves_no_room_for_is_not_listed() -> None:
    def names(**asked: object) -> set[str]:
        made = plan(chain([1.0] * 6), cluster(2), global_batch=4, **asked)  # type: ignore[arg-type]
        return {name for row in made.rejected for name in row.names}

    assert "2 replicas" not in names(depths=[2])
    assert "data parallelism, no pipeline" in names(depths=[2])
    assert "2 stages" not in names(replicas=[2])
    assert "2 replicas" in names(depths=[1, 2], replicas=[1, 2]) or "2 stages" in names(depths=[1, 2], replicas=[1, 2])


def test_over_the_limit_is_a_reason() -> None:
    made = plan(heavy(), cluster(4, link=SLOW), global_batch=16, memory_bytes=3 * GIB)
    assert made.rejected[-1].reason == "over the 2.85 GiB limit on rank 0"


def test_a_tied_parameter_is_summed_over_its_stages() -> None:
    tie = Tie("embedding", (0, 3), 8000)
    profile = chain([1.0] * 4, parameter_bytes=8000, ties=[tie])
    link = Link(1.0, 1000.0)
    made = plan(profile, cluster(2, link=link), global_batch=4, depths=[2], micro_batches=[1])
    assert [(t.name, t.stages, t.bytes) for t in made.ties] == [("embedding", (0, 1), 8000)]
    # a ring of two: 2 messages of half the bytes
    assert [stage.costs.optimizer_s for stage in made.stages] == [2 * (1 + 4000 / 1000)] * 2
    v = plan(profile, cluster(2, link=link), global_batch=4, depths=[2], micro_batches=[1], schedules=["ZB-V"])
    assert [stage.rank for stage in v.stages] == [0, 1, 1, 0]
    assert [stage.costs.optimizer_s for stage in v.stages] == [0, 0, 0, 0]  # one rank holds it: there is nothing to sum
    assert [stage.costs.shared_bytes for stage in v.stages] == [8000, 0, 0, 0]
    alone = plan(profile, cluster(2, link=link), global_batch=4, depths=[1], micro_batches=[1])
    assert (alone.ties, alone.stages[0].costs.optimizer_s) == ((), 0)


# every schedule -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every() -> Plan:
    profile = chain([0.1, *[1.0] * 10, 2.6], parameter_bytes=GIB // 64, held_bytes=GIB // 64, micro_batches=(1, 2))
    return plan(profile, cluster(3, link=SLOW), global_batch=8, schedules=["all"], depths=[2, 3])


def test_all_lists_every_schedule_with_a_number_or_a_reason(every: Plan) -> None:
    rows = {name: row for row in every.rejected for name in row.names}
    assert {k.name for k in kinds("torch")} - {every.schedule.name} <= set(rows)
    assert all(row.step_s is not None or row.reason.startswith("cannot run: ") for row in every.rejected)
    steps = [row.step_s for row in every.rejected if row.step_s is not None and "limit on" not in row.reason]
    assert min(steps) >= every.predicted.step_s * (1 - 1e-9)


def test_a_plan_with_several_stages_on_a_rank_is_what_the_simulator_says(every: Plan) -> None:
    assert every.stages_per_rank == len(every.stages) // every.depth
    line = again(every)
    assert (line.step_s, line.peak_bytes) == (every.predicted.step_s, every.predicted.peak_bytes)


@pytest.mark.parametrize("name", ["ZB-V", "Interleaved1F1B", "V-Min"])
def test_stages_that_share_a_rank_share_its_memory(name: str) -> None:
    held = [GIB // 8] * 7 + [GIB // 64]
    profile = chain([1.0] * 8, parameter_bytes=GIB // 8, held_bytes=held, micro_batches=(1,))
    asked = {"global_batch": 8, "schedules": [name], "depths": [2], "headroom": 0.0}
    free = plan(profile, cluster(2), **asked)  # type: ignore[arg-type]
    limit = max(free.predicted.peak_bytes)
    same = plan(profile, cluster(2), **asked, memory_bytes=limit)  # type: ignore[arg-type]
    assert (same.cuts, same.predicted) == (free.cuts, free.predicted)
    tight = plan(profile, cluster(2), **asked, memory_bytes=int(0.94 * limit))  # type: ignore[arg-type]
    assert max(tight.predicted.peak_bytes) <= 0.94 * limit
    assert tight.predicted.step_s >= free.predicted.step_s
    with pytest.raises(NoPlanFits, match=r"the smallest needs .* on rank \d, the limit is"):
        plan(profile, cluster(2), **asked, memory_bytes=GIB)  # type: ignore[arg-type]


def test_too_few_layers_are_a_reason() -> None:
    made = plan(chain([1.0] * 3), cluster(2), global_batch=4, schedules=["all"], depths=[2])
    reasons = {name: row.reason for row in made.rejected for name in row.names}
    assert reasons["ZB-V"] == "cannot run: it needs 4 stages, the model can be cut into 3"
    with pytest.raises(UsageError, match="ZB-V cannot run: it needs 4 stages, the model can be cut into 3"):
        plan(chain([1.0] * 3), cluster(2), global_batch=4, schedules=["ZB-V"], depths=[2])


# what cannot be meant ----------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, object], str]] = {
    "depth above the layers": ({"depths": [5]}, "depth 5 is more than the model's 4 layers: use --depth 1…3"),
    "depth above the legal cuts": ({"depths": [4]}, "the model's 4 layers can be cut into 3 stages at most"),
    "depth zero": ({"depths": [0]}, "depth 0 is not possible"),
    "depth above the devices": ({"depths": [3], "devices": 2}, "depth 3 is more than the 2 devices: use --depth 1…2"),
    "devices": ({"devices": 9}, "9 devices wanted, cluster 'made by hand' has 8"),
    "replicas": ({"replicas": [9]}, "9 replicas cannot run on 8 devices: use --replicas 1…8"),
    "replicas zero": ({"replicas": [0]}, "0 replicas cannot run on 8 devices"),
    "replicas that do not divide": ({"replicas": [3]}, "global batch 8 cannot be shared out to 3 replicas"),
    "no replicas": ({"replicas": []}, "no number of replicas is left to try"),
    "micro-batch not measured": ({"micro_batches": [3]}, "micro-batch 3 was not profiled, only 2, 4"),
    "nothing divides": ({"global_batch": 7}, "7 is not divisible by micro-batch 2 or 4: use --global-batch 6 or 8"),
    "asked does not": ({"global_batch": 6, "micro_batches": [4]}, "by micro-batch 4: use --micro-batch 2"),
    "global batch zero": ({"global_batch": 0}, "global batch 0 is not possible"),
    "schedule": ({"schedules": ["2F2B"]}, "schedule '2F2B' is not known: use one of 1F1B, Chimera, Chimera-Doubled"),
    "no depth": ({"depths": []}, "no depth is left to try: use --depth 1…8"),
    "no micro-batch": ({"micro_batches": []}, "no micro-batch size is left to try: the profile has [2, 4]"),
    "no schedule": ({"schedules": []}, "no schedule is left to try"),
    "optimizer": ({"optimizer": "lion"}, "optimizer 'lion' is not known: use one of sgd"),
    "recompute": ({"recompute": "some"}, "recompute 'some' is not known: use one of auto, none, all"),
    "headroom": ({"headroom": 1.0}, "headroom is 1.0"),
    "memory": ({"memory_bytes": 0}, "memory is 0 bytes"),
    "pin of no layer": ({"pins": {"layers.9": 0}}, "pin layers.9=0: no layer has that name; there are layers."),
    "pin below zero": ({"pins": {"layers.0": -1}}, "stages are numbered from 0"),
    "pin of the first layer": ({"pins": {"layers.0": 1}}, "pin layers.0=1 cannot hold"),
    "pins against the order": ({"pins": {"layers.1": 1, "layers.3": 0}}, "pin layers.1=1, layers.3=0 cannot hold"),
    "pins that an illegal cut parts": ({"pins": {"layers.1": 0, "layers.2": 1}}, "cannot hold"),
    "pin beyond the depth": ({"pins": {"layers.3": 2}, "depths": [2]}, "cannot hold with 2 stages"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant(change: dict[str, object], message: str) -> None:
    profile = chain([1.0] * 4, micro_batches=(2, 4), legal=[True, False, True, True])
    with pytest.raises(UsageError) as caught:
        plan(profile, cluster(8), **({"global_batch": 8} | change))  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_pins_are_kept() -> None:
    profile = chain([1.0] * 6)
    free = plan(profile, cluster(3), global_batch=8)
    assert free.cuts == (2, 4)
    made = plan(profile, cluster(3), global_batch=8, pins={"layers.2": 0, "layers.5": 2})
    assert made.cuts in {(3, 4), (3, 5)}
    assert made.depth == 3


def test_sizes_that_do_not_divide_are_left_out() -> None:
    profile = chain([1.0] * 4, micro_batches=(1, 2, 4))
    made = plan(profile, cluster(2), global_batch=6)
    assert made.micro_batch in (1, 2)
    assert "micro-batch 4" not in {name for row in made.rejected for name in row.names}


def test_layers_that_must_not_split_go_where_the_backward_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that splits the backward of its last stage only, and a last layer that must stay whole."""

    def make(shape: Shape, times: Sequence[StageTimes]) -> Order:
        *rows, last = kind("1F1B").schedule(shape.ranks, shape.micro_batches).order
        split = [(Op.I, Op.W) if a.op is Op.B else (a.op,) for a in last]
        return (*rows, tuple(a._replace(op=op) for a, ops in zip(last, split, strict=True) for op in ops))

    monkeypatch.setattr("autopipe.core.schedule._KINDS", dict(core_schedule._KINDS))
    monkeypatch.setattr("autopipe.core.schedule._ALIASES", dict(core_schedule._ALIASES))
    core_schedule.schedule("Halves")(make)
    profile = chain([1.0] * 4)
    whole = replace(profile, layers=(*profile.layers[:3], replace(profile.layers[3], can_split_backward=False)))
    assert plan(profile, cluster(2), global_batch=4, schedules=["Halves"], depths=[2]).schedule.name == "Halves"
    with pytest.raises(UsageError, match="must not split"):
        plan(whole, cluster(2), global_batch=4, schedules=["Halves"], depths=[2])
    first = replace(profile, layers=(replace(profile.layers[0], can_split_backward=False), *profile.layers[1:]))
    made = pipelined(first, cluster(2), global_batch=4, schedules=["Halves", "GPipe"])
    assert (made.depth, made.schedule.name) == (2, "Halves")
    made = pipelined(whole, cluster(2), global_batch=4, schedules=["Halves", "GPipe"])
    assert made.schedule.name == "GPipe"
    assert {name: row.reason for row in made.rejected for name in row.names}["Halves"].startswith("cannot run")


# what the plan holds -----------------------------------------------------------------------------------------------


def test_the_plan_carries_what_it_came_from() -> None:
    profile, devices = chain([1.0] * 4), cluster(2)
    made = plan(profile, devices, global_batch=4)
    assert made.model == ModelRef("synthetic")
    assert made.profile == FileRef(profile.digest)
    assert made.provenance.keys() == {"autopipe"}
    refs = {"model": ModelRef("m", "m.py"), "profile_ref": FileRef("a", "b"), "cluster_ref": FileRef("c", "d")}
    given_ = plan(profile, devices, global_batch=4, **refs)  # type: ignore[arg-type]
    assert (given_.model, given_.profile, given_.cluster) == tuple(refs.values())


def test_stages_hold_names_and_boundaries() -> None:
    made = plan(chain([1.0] * 4), cluster(2), global_batch=4, depths=[2])
    first, second = made.stages
    assert first.layers + second.layers == tuple(f"layers.{i}" for i in range(4))
    assert first.sends == second.receives
    assert [edge.name for edge in first.sends] == [f"x{first.stop - 1}"]
    assert (first.receives, second.sends) == ((), ())
    assert second.modules == second.layers


def test_planning_does_not_import_torch(tmp_path: Path) -> None:
    write(chain([1.0] * 4), tmp_path / "p.json")
    write(cluster(2), tmp_path / "c.json")
    code = (
        "import sys; from autopipe import plan, Profile, Cluster; from autopipe.core.files import read;"
        f"profile, cluster = read({str(tmp_path / 'p.json')!r}, Profile), read({str(tmp_path / 'c.json')!r}, Cluster);"
        "p = plan(profile, cluster, global_batch=4);"
        "assert p.depth * p.replicas == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@example(108)
@given(seeds)
@settings(max_examples=20, deadline=None)
def test_jitter_is_in_every_step_and_the_least_one_is_chosen(seed: int) -> None:
    rng = random.Random(seed)
    profile, devices = tiny(rng), cluster(3, link=Link(0.1, 1e3))
    uneven = replace(profile, jitter=Jitter(0.5, (0.8, 0.9, 1.0, 1.1, 1.6)))
    asked = {"global_batch": 4, "schedules": ["GPipe", "1F1B", "ZB-H1"], "recompute": "none"}
    even, made = plan(profile, devices, **asked), plan(uneven, devices, **asked)  # type: ignore[arg-type]
    line = again(made)
    assert made.predicted.step_s == pytest.approx(line.step_s + made.predicted.jitter_s)
    assert made.gap == pytest.approx(line.step_s / made.lower_bound_s - 1)
    assert line.step_s >= even.predicted.step_s * (1 - 1e-9)
    assert made.depth == 1 or made.predicted.jitter_s > 0
    rules = [f"{rule}, {made.schedule.name}" for rule in BASELINES]
    steps = [row.step_s for row in made.rejected if {*row.names} & {*asked["schedules"], *rules} and row.step_s]  # type: ignore[misc]
    assert made.predicted.step_s <= min(steps, default=float("inf")) * (1 + 2e-3)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_no_cut_that_is_moved_by_a_layer_has_a_step_with_less_jitter(seed: int) -> None:
    rng = random.Random(seed)
    profile = chain([rng.uniform(0.5, 1.5) for _ in range(8)])
    uneven = replace(profile, jitter=Jitter(0.5, tuple(sorted(rng.uniform(0.9, 1.2) for _ in range(5)))))
    devices = cluster(2, speeds=[1.0, rng.uniform(0.2, 1.0)])
    asked = {"global_batch": 8, "depths": [2], "replicas": [1], "schedules": ["1F1B"], "recompute": "none"}
    made = plan(uneven, devices, **asked)  # type: ignore[arg-type]
    for cut in {made.cuts[0] - 1, made.cuts[0] + 1} & {*range(1, 8)}:
        pins = {f"layers.{number}": int(number >= cut) for number in range(8)}
        other = plan(uneven, devices, pins=pins, **asked)  # type: ignore[arg-type]
        same_order = [s.rank for s in other.stages] == [s.rank for s in made.stages]
        assert not same_order or made.predicted.step_s <= other.predicted.step_s * (1 + 2e-3)
