"""A step's totals against its timeline."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.cluster import Link
from autopipe.core.schedule import kind
from autopipe.planning.cases import Case
from autopipe.planning.outcome import outcome
from autopipe.planning.ranges import Ranges
from autopipe.planning.setting import Setting
from autopipe.solvers.brute import splits
from tests.synthetic import chain, cluster
from tests.test_planning import random_case

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.sampled_from(["none", "all"]), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_totals_are_those_of_the_timeline(seed: int, recompute: str, replicas: int) -> None:
    rng = random.Random(seed)
    case = random_case(rng, recompute=recompute)
    devices = cluster(case.depth * replicas, link=Link(0.1, 50.0))
    setting = Setting(case.setting.profile, devices, "adamw", (2**40,) * len(devices), {})
    compare(replace(case, setting=setting, replicas=replicas), rng)


@pytest.mark.parametrize("name", ["PipeDream", "PipeDream-2BW", "Chimera"])
def test_so_are_those_of_tables_that_our_own_runtime_runs(name: str) -> None:
    setting = Setting(chain([1.0, 2.0, 1.5, 1.0, 0.5]), cluster(2, link=Link(0.1, 50.0)), "adamw", (2**40,) * 2, {})
    ranges = Ranges.of(setting.profile, 1, optimizer="adamw")
    compare(Case.of(setting, ranges, kind(name).schedule(2, 4), 1, "none"), random.Random(0))


def compare(case: Case, rng: random.Random) -> None:
    found = outcome(case, rng.choice(list(splits(case.ranges.pieces, case.parts))))
    step_s, works_s = found.totals
    line = found.timeline
    assert step_s == pytest.approx(line.step_s, rel=1e-12)
    assert works_s == pytest.approx([line.work_s(rank) for rank in range(line.ranks)], rel=1e-12)
    assert found.totals.idle == pytest.approx(line.idle, abs=1e-12)
    assert found.peaks == line.peak_bytes
