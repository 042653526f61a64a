"""Stages on unequal numbers of devices: planned, priced, and refused where they would run."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopipe
from autopipe import plan
from autopipe.core import files
from autopipe.core.cluster import Link
from autopipe.core.errors import CannotExport, NoPlanFits, UsageError
from autopipe.core.plan import PLANNED_ONLY, Plan
from autopipe.core.profile import Profile
from autopipe.core.schedule import kind
from autopipe.core.stage import stage_cost
from autopipe.explain import explanation
from autopipe.export.trainer import trainers
from autopipe.report.terminal import plan_text
from autopipe.simulate import simulate, simulate_plan
from tests.synthetic import chain, cluster
from tests.test_search import tiny

ASKED = {"global_batch": 8, "headroom": 0.0, "recompute": "none", "unequal_replicas": True}


def uneven() -> Profile:
    """Two layers of which the second takes twice as long, and much to send between copies of both."""
    return chain([1.0, 2.0], parameter_bytes=[0, 0], micro_batches=(1, 2, 4), output_elements=1)


def test_a_stage_of_twice_the_work_gets_twice_the_devices() -> None:
    """Three devices: 3 s and 6 s a row; with two for the second stage both take 6 s for 2 rows."""
    made = plan(uneven(), cluster(3), micro_batches=[1, 2], schedules=["1F1B"], replicas=[1], **ASKED)  # type: ignore[arg-type]
    assert [stage.replicas for stage in made.stages] == [1, 2]
    assert (made.unequal, made.processes, made.depth, made.replicas) == (True, 3, 2, 1)
    assert (made.micro_batch, made.micro_batches) == (2, 4)
    assert [stage.costs.forward_s for stage in made.stages] == [2.0, 2.0]
    assert made.predicted.step_s == pytest.approx((4 + 1) * 6.0)  # a pipeline of two, four micro-batches
    assert simulate_plan(made).step_s == pytest.approx(made.predicted.step_s)
    assert made.lower_bound_s == pytest.approx(8 * 9 / 3)
    assert made.notes[-1] == PLANNED_ONLY
    row = made.rejected[0]
    assert (row.what, row.reason) == ("equal replicas", "+70.0 %")  # 8 · 6 s, and 3 s before


def test_it_is_said_and_kept(tmp_path: Path) -> None:
    made = plan(uneven(), cluster(3), micro_batches=[1, 2], replicas=[1], **ASKED)  # type: ignore[arg-type]
    made.save(tmp_path / "plan.json")
    assert files.load(tmp_path / "plan.json") == made
    text = plan_text(made)
    assert "1 2 replicas" in text
    assert "1 × 2" in text
    assert "3 × made by hand" in text


def test_nothing_runs_it() -> None:
    made = plan(uneven(), cluster(3), micro_batches=[1, 2], replicas=[1], **ASKED)  # type: ignore[arg-type]
    for trainer in trainers():
        with pytest.raises(CannotExport, match="as many replicas of each stage"):
            trainer.files(made)
    with pytest.raises(UsageError, match=PLANNED_ONLY):
        autopipe.check(made)
    with pytest.raises(UsageError, match=PLANNED_ONLY):
        made.build(None, None)


def test_contradictions_are_refused() -> None:
    made = plan(uneven(), cluster(3), micro_batches=[1, 2], replicas=[1], **ASKED)  # type: ignore[arg-type]
    wrong = (made.stages[0], replace(made.stages[1], replicas=3))
    with pytest.raises(UsageError, match="must divide the micro-batch of 2"):
        replace(made, stages=wrong)
    with pytest.raises(UsageError, match="no other replicas"):
        replace(made, replicas=2, global_batch=16)


def test_devices_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="their speed or memory differs: plan without"):
        plan(uneven(), cluster(3, speeds=(1.0, 1.0, 0.5)), **ASKED)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there are 17: plan without"):
        plan(uneven(), cluster(17), **ASKED)  # type: ignore[arg-type]


def test_equal_replicas_stay_where_they_are_faster() -> None:
    profile = chain([1.0] * 4, micro_batches=(1, 2))
    without = plan(profile, cluster(4), global_batch=8)
    made = plan(profile, cluster(4), global_batch=8, unequal_replicas=True)
    assert not made.unequal
    assert made.stages == without.stages
    assert made.lower_bound_s <= without.lower_bound_s


def shortest(profile: Profile, devices: int, link: Link, limit: int) -> float:
    """Of all splits and unequal replicas with 1F1B, with nothing of the planner in between."""
    best, size = math.inf, 4
    for depth in range(2, devices):
        for counts in itertools.product((1, 2), repeat=depth):
            if sum(counts) > devices or len(set(counts)) == 1:
                continue
            for cuts in itertools.combinations(profile.legal_cuts(), depth - 1):
                bounds = itertools.pairwise([0, *cuts, len(profile.layers)])
                costs = []
                for count, bound in zip(counts, bounds, strict=True):
                    cost = stage_cost(profile, *bound, size // count)
                    ring_s = 2 * (count - 1) * (link.latency_s + cost.gradient_bytes / count / link.bytes_per_s)
                    costs.append(replace(cost, reduce_s=ring_s if cost.gradient_bytes else 0.0))
                hops = [
                    Link(link.latency_s * max(a, b) / min(a, b), link.bytes_per_s * min(a, b) / a)
                    for a, b in itertools.pairwise(counts)
                ]
                line = simulate(kind("1F1B").schedule(depth, 2), costs, hops, overhead_s=profile.overhead_s)
                if max(line.peak_bytes) <= limit:
                    best = min(best, line.step_s)
    return best


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_best_of_all_by_brute_force(seed: int) -> None:
    """Few ways are all looked at; and the bound holds."""
    rng = random.Random(seed)
    link = Link(rng.choice([0.0, 0.1]), rng.choice([1e3, 30.0]))
    profile, limit = tiny(rng), rng.choice([10**9, rng.randint(1000, 4000)])
    depths = [depth for depth in (2, 3) if depth <= len(profile.legal_cuts()) + 1]
    assume(depths)
    best = shortest(profile, 4, link, limit)
    asked = {"global_batch": 8, "headroom": 0.0, "recompute": "none", "schedules": ["1F1B"], "memory_bytes": limit}
    try:
        made: Plan = plan(
            profile,
            cluster(4, link=link),
            micro_batches=[2, 4],
            depths=depths,
            replicas=[1],
            unequal_replicas=True,
            **asked,
        )  # type: ignore[arg-type]
    except NoPlanFits:
        assert best == math.inf
        return
    assert made.lower_bound_s <= made.predicted.step_s * (1 + 1e-9)
    assert simulate_plan(made).step_s == pytest.approx(made.predicted.step_s)
    assert max(made.predicted.peak_bytes) <= limit
    assert made.predicted.step_s <= best * (1 + 1e-9)
    if made.unequal and {stage.replicas for stage in made.stages} == {1, 2} and made.micro_batch == 4:
        assert made.predicted.step_s >= best * (1 - 1e-9)


def test_why_has_its_devices() -> None:
    made = plan(uneven(), cluster(3), micro_batches=[1, 2], replicas=[1], **ASKED)  # type: ignore[arg-type]
    assert "limited by stage" in explanation(made, uneven(), cluster(3))
