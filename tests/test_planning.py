"""The parts of the search: tables against stage_cost, recomputation and bounds against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401  registers them
from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.core.profile import Profile, Tie
from autopipe.core.schedule import Shape, kind, kinds
from autopipe.core.stage import StageCost, shared_ties, stage_cost
from autopipe.core.timeline import Timeline
from autopipe.loads import peak_loads
from autopipe.planning.best import glance, search
from autopipe.planning.bounds import quick_bound_s
from autopipe.planning.cases import Case
from autopipe.planning.outcome import outcome
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.setting import Setting
from autopipe.planning.space import Space, numbers
from autopipe.simulate import simulate
from autopipe.solvers.brute import splits
from tests.synthetic import chain, cluster, random_schedule

seeds = st.integers(0, 2**32 - 1)


def random_profile(rng: random.Random, layers: int) -> Profile:
    """Uneven layers, some cuts illegal, some parameters tied, equal costs often."""
    pool = [rng.uniform(0.5, 2) for _ in range(rng.choice([1, 2, layers]))]
    ties = [Tie("tied", (0, layers - 1), 64)] if layers > 1 and rng.random() < 0.5 else []
    return chain(
        [rng.choice(pool) for _ in range(layers)],
        backward_s=[rng.choice(pool) for _ in range(layers)],
        parameter_bytes=[64 + 4 * rng.randint(0, 50) for _ in range(layers)],
        held_bytes=[rng.randint(0, 400) for _ in range(layers)],
        output_elements=rng.randint(1, 40),
        optimizer_s=rng.choice([0.0, 0.3]),
        workspace_bytes=rng.randint(0, 50),
        legal=[rng.random() < 0.8 for _ in range(layers)],
        ties=ties,
        overhead_s=rng.choice([0.0, 0.1]),
        micro_batches=(1, 2),
        constant=[i for i in range(layers) if rng.random() < 0.2],
    )


def random_case(rng: random.Random, *, limit: int = 2**40, recompute: str = "none", layers: int = 5) -> Case:
    profile = random_profile(rng, rng.randint(1, layers))
    depth = rng.randint(1, min(4, len(profile.legal_cuts()) + 1))
    link = Link(rng.choice([0.0, 0.2]), rng.choice([50.0, 1e9]))
    speeds = [rng.choice([1.0, 1.0, 2.0, 0.7]) for _ in range(depth)]
    setting = Setting(profile, cluster(depth, link=link, speeds=speeds), "adamw", (limit,) * depth, {})
    ranges = Ranges.of(profile, 1, optimizer="adamw", recompute_all=recompute == "all")
    batches = rng.randint(1, 5)
    tables = [
        k.schedule(ranks, batches, stages_per_rank=number)
        for k in kinds("torch")
        for number in numbers(k)
        if depth % number == 0 and not k.refuses(Shape(ranks := depth // number, batches, k.place(ranks, number)))
    ]
    tables.append(random_schedule(rng, ranks=depth, stages=depth, micro_batches=batches, in_order=True))
    table = rng.choice(tables)
    return Case.of(setting, ranges, table, 1, recompute)


@given(seeds, st.booleans())
@settings(max_examples=80, deadline=None)
def test_ranges_are_stage_costs(seed: int, recompute_all: bool) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(1, 7))
    ranges = Ranges.of(profile, 2, optimizer="sgd", recompute_all=recompute_all)
    for a, b in itertools.combinations(range(len(ranges.ends)), 2):
        start, stop = ranges.ends[a], ranges.ends[b]
        again = range(start, stop) if recompute_all else ()
        cost = stage_cost(profile, start, stop, 2, optimizer="sgd", recompute=again)
        for field in ("forward", "backward", "input_grad", "weight_grad", "optimizer"):
            seconds = getattr(ranges, field)[a, b] * ranges.tick_s
            assert seconds == pytest.approx(getattr(cost, f"{field}_s"), rel=1e-9, abs=1e-12)
        assert ranges.static[a, b] == cost.static_bytes
        assert ranges.gradient[a, b] == cost.gradient_bytes
        most = np.minimum(ranges.first_backward, ranges.held + ranges.gradient + ranges.workspace)
        assert most[a, b] == cost.first_backward_bytes
        assert ranges.held[a, b] == cost.held_after_forward_bytes
        assert ranges.held_after_input_grad[a, b] == cost.held_after_input_grad_bytes
        assert ranges.workspace[a, b] == cost.workspace_bytes
        assert (ranges.activations[a], ranges.gradients[b]) == (cost.receive_bytes, cost.receive_grad_bytes)
        assert (ranges.activations[b], ranges.gradients[a]) == (cost.send_bytes, cost.send_grad_bytes)


@given(seeds, st.sampled_from(["none", "all", "auto"]), st.integers(300, 4000))
@settings(max_examples=120, deadline=None)
def test_cases_and_the_plain_simulator_agree(seed: int, recompute: str, limit: int) -> None:
    case = random_case(random.Random(seed), limit=limit, recompute=recompute)
    for found in case.measured(splits(case.ranges.pieces, case.stages)):
        again = tuple(layer for stage in case.recomputed(found.positions) for layer in stage)
        line = simulated(case, found.positions, again)
        assert line.step_s == pytest.approx(found.step_s, rel=1e-9)
        if recompute == "auto" and case.stages > case.depth:  # stages share a rank's memory in equal parts
            assert max(line.peak_bytes) <= found.bytes
        else:
            assert max(line.peak_bytes) == found.bytes
        full = outcome(case, found.positions)  # drops layers that need not recompute
        assert full.over_limit() is None
        assert full.timeline.step_s <= line.step_s * (1 + 1e-9)


def test_asking_whether_anything_fits_keeps_no_tables() -> None:
    """The tables of two hundred layers on 64 devices, kept for all depths, took more than 20 GB."""
    profile = chain([1.0] * 12, parameter_bytes=[100] * 12)
    for limit, fits in ((500, False), (5000, True)):
        setting = Setting(profile, cluster(6), "adamw", (limit,) * 6, {})
        space = Space(setting, 8, (4, 5, 6), (1,), (1,), (kind("1F1B"),), "auto")
        assert space.fits() is fits
        assert space._cases
        assert not any("tables" in vars(case) for case in space._cases.values())


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_a_case_without_its_tables_says_the_same(seed: int) -> None:
    kept, case = (random_case(random.Random(seed), limit=2000, recompute="auto") for _ in range(2))
    case.let_go()
    for each in (kept, case):
        assert each.lower_bound_s == kept.lower_bound_s
        case.let_go()
        assert each.best == kept.best
    case.let_go()
    assert not {"tables", "splits", "rough", "least_ends"} & {*vars(case)}
    assert case.tight == kept.tight
    assert case.measured(case.baselines()) == kept.measured(kept.baselines())


@pytest.mark.parametrize("find", [search, glance])
def test_a_search_keeps_no_tables(find: Callable[[Space], object]) -> None:
    """Those of hundreds of cases, two hundred layers on 16,384 devices, took more than 12 GB."""
    setting = Setting(chain([1.0, 2.0, 1.5] * 4), cluster(6), "adamw", (2**40,) * 6, {})
    kinds_ = tuple(map(kind, ("1F1B", "GPipe", "Interleaved1F1B", "ZB-V")))
    space = Space(setting, 8, (1, 2, 3, 6), (1, 2), (1,), kinds_, "auto")
    assert find(space) is not None
    cases = [*space._cases.values(), *(choice.case for choice in space._choices.values() if choice)]
    assert cases
    assert not any("tables" in vars(case) for case in cases)


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_no_step_is_shorter_than_a_stage_of_its_pieces_leaves_it(seed: int) -> None:
    """So what is left of the tables' ranges is enough for all splits with short steps."""
    case = random_case(random.Random(seed), recompute="none")
    least = case.ranges.least_step(case.outline.micro_batches) * case.ranges.tick_s / case.seats.fastest
    for found in case.measured(splits(case.ranges.pieces, case.stages)):
        assert found.step_s >= least[np.diff(found.positions).max() - 1] * (1 - 1e-9)


@given(seeds, st.sampled_from(["none", "all", "auto"]), st.integers(300, 4000))
@settings(max_examples=120, deadline=None)
def test_what_is_not_allowed_does_not_fit(seed: int, recompute: str, limit: int) -> None:
    case = random_case(random.Random(seed), limit=limit, recompute=recompute)
    every = list(splits(case.ranges.pieces, case.stages))
    allowed = {found.positions for found in case.measured(every)}
    assert case.fits() == bool(allowed)
    if recompute == "auto" and case.stages > case.depth:
        return  # its stages share a rank's memory in equal parts, and could do so unequally
    for positions in every:
        if positions not in allowed:
            assert outcome(case, positions).over_limit() is not None


@given(seeds, st.floats(0.3, 1.1))
@settings(max_examples=80, deadline=None)
def test_nothing_beats_the_bounds(seed: int, part: float) -> None:
    """Every split, and every choice of recomputed layers, that fits takes at least as long as the bounds say."""
    free = random_case(random.Random(seed), recompute="auto")
    every = list(splits(free.ranges.pieces, free.stages))
    limit = int(part * min(max(simulated(free, positions, ()).peak_bytes) for positions in every))
    case = random_case(random.Random(seed), limit=limit, recompute="auto")
    bound = case.lower_bound_s
    number = case.stages // case.depth
    quick = quick_bound_s(case.ranges, case.seats, case.schedule.micro_batches, stages_per_rank=number)
    assert quick <= case.quick_bound_s * (1 + 1e-9)  # which knows whether backwards are split
    layers = range(len(case.setting.profile.layers))
    for positions in every:
        for again in itertools.product((False, True), repeat=len(layers)):
            line = simulated(case, positions, tuple(itertools.compress(layers, again)))
            if all(peak <= limit for peak in line.peak_bytes):
                assert min(line.step_s / bound, line.step_s / quick) >= 1 - 1e-9


def simulated(case: Case, positions: tuple[int, ...], again: tuple[int, ...]) -> Timeline:
    profile, ends = case.setting.profile, case.ranges.ends
    placement = case.schedule.placement
    bounds = [(ends[a], ends[b]) for a, b in itertools.pairwise(positions)]
    costs: list[StageCost] = []
    for stage, layers in enumerate(bounds):
        shared = shared_ties(profile, bounds, placement, stage)
        cost = stage_cost(
            profile,
            *layers,
            1,
            speed=case.seats.speeds[placement[stage]],
            optimizer="adamw",
            recompute=again,
            shared=shared,
        )
        ranks = {
            tie: {rank for rank, held in zip(placement, bounds, strict=True) if tie.read_in(*held)}
            for tie in profile.ties
        }
        sums_s = sum(case.seats.tie_s(t) for t in ranks if t.read_in(*layers) and t not in shared and len(ranks[t]) > 1)
        costs.append(replace(cost, optimizer_s=cost.optimizer_s + sums_s))
    return simulate(case.schedule, costs, case.hops, overhead_s=profile.overhead_s)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_bound_is_met_by_equal_stages(name: str, ranks: int) -> None:
    profile = chain([1.0] * ranks)
    setting = Setting(profile, cluster(ranks), "adamw", (2**40,) * ranks, {})
    case = Case.of(setting, Ranges.of(profile, 1, optimizer="adamw"), kind(name).schedule(ranks, 2 * ranks), 1, "none")
    assert case.best is not None
    assert case.lower_bound_s == pytest.approx(case.best.step_s)


def test_the_bound_of_all_forwards_first_is_met_by_one_long_stage() -> None:
    """GPipe's step is the way through all stages, and the longest one's work for each further micro-batch."""
    profile = chain([1.0, 2.0, 1.0])
    setting = Setting(profile, cluster(3), "adamw", (2**40,) * 3, {})
    case = Case.of(setting, Ranges.of(profile, 1, optimizer="adamw"), kind("GPipe").schedule(3, 8), 1, "none")
    assert case.best is not None
    assert case.best.step_s == pytest.approx(3 * 4 + 7 * 6)
    assert case.lower_bound_s == pytest.approx(case.best.step_s)


def test_slow_links_raise_the_bound_by_round_trips() -> None:
    """With 1F1B's few micro-batches in flight a slow link is waited for again and again; no bound on work sees it."""
    profile = chain([1.0] * 4)
    setting = Setting(profile, cluster(4, link=Link(10.0, 1e18)), "adamw", (2**40,) * 4, {})
    case = Case.of(setting, Ranges.of(profile, 1, optimizer="adamw"), kind("1F1B").schedule(4, 16), 1, "none")
    assert case.best is not None
    assert case.lower_bound_s > 0.9 * case.best.step_s


def test_rows_of_1f1b() -> None:
    rows = Outline.of(kind("1F1B").schedule(4, 8)).rows
    assert [row.rounds for row in rows] == [2, 3, 4, 8]
    assert {row.counts for row in rows} == {(8, 8, 0, 0)}
    assert {(row.splits, row.trailing) for row in rows} == {(False, 0)}
    assert [row.rounds for row in Outline.of(kind("GPipe").schedule(3, 8)).rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(6000, ()), (5999, (1,)), (5000, (1,)), (4999, (0, 1)), (3000, (0, 1)), (2999, None)],
)
def test_the_cheapest_layers_recompute_first(limit: int, expected: tuple[int, ...] | None) -> None:
    """Three layers hold 1000 bytes for each of two micro-batches; the second is cheapest to run again, then the first.

    A layer that runs again needs its 1000 bytes as workspace meanwhile: 6000, 4000 + 1000, 2000 + 1000. The last
    layer keeps what it holds.
    """
    profile = chain([3.0, 1.0, 0.5], held_bytes=1000, output_elements=0)
    setting = Setting(profile, cluster(1), "sgd", (limit,), {})
    case = Case.of(setting, Ranges.of(profile, 1, optimizer="sgd"), kind("GPipe").schedule(1, 2), 1, "auto")
    full = outcome(case, (0, 3))
    assert case.fits() == (expected is not None) == (full.over_limit() is None)
    if expected is not None:
        assert full.recompute == (expected,)


def test_layers_that_a_later_one_made_needless_are_dropped() -> None:
    """In the order of seconds for each byte the small layer comes first, but the large one alone frees enough."""
    profile = chain([0.1, 2.0, 1.0], held_bytes=[100, 1000, 10], output_elements=0)
    setting = Setting(profile, cluster(1), "sgd", (2300,), {})
    case = Case.of(setting, Ranges.of(profile, 1, optimizer="sgd"), kind("GPipe").schedule(1, 3), 1, "auto")
    assert case.recomputed((0, 3)) == ((0, 1),)
    assert outcome(case, (0, 3)).recompute == ((1,),)


def test_moving_cuts_mostly_finds_the_best_split() -> None:
    """It is not promised to; but here all splits can be tried, and a search that often fell short would be broken."""
    found = 0
    for seed in range(40):
        rng = random.Random(seed)
        profile = random_profile(rng, 10)
        depth = min(4, len(profile.legal_cuts()) + 1)
        setting = Setting(profile, cluster(depth), "adamw", (2**40,) * depth, {})
        case = Case.of(setting, Ranges.of(profile, 1, optimizer="adamw"), kind("1F1B").schedule(depth, 8), 1, "none")
        best, refined = case.best, case.refined()
        assert best is not None
        assert refined is not None
        assert refined.step_s <= 1.02 * best.step_s
        found += refined.step_s <= best.step_s * (1 + 1e-9)
    assert found >= 38


def test_peak_loads_of_many_micro_batches_are_few() -> None:
    assert len(peak_loads(kind("GPipe").schedule(1, 500), 0)) == 2  # before the gradients are there, and after
    assert len(peak_loads(kind("1F1B").schedule(8, 500), 0)) == 1


# the parts that make it fast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("ranks", "batches"), [(1, 1), (1, 4), (3, 1), (4, 2), (3, 7), (2, 9)])
def test_what_runs_in_turn_needs_no_order(name: str, ranks: int, batches: int) -> None:
    schedule, ahead = kind(name).schedule(ranks, batches), kind(name).ahead
    assert ahead is not None
    counts = ahead(Shape(ranks, batches, schedule.placement))
    outline = Outline.in_turn(name, batches, counts)
    expected = Outline.of(schedule)
    assert replace(outline, moments=(), ahead=()) == replace(expected, moments=())
    assert [set(moments) for moments in outline.moments] == [set(moments) for moments in expected.moments]


@given(seeds, st.sampled_from(["none", "auto"]), st.integers(300, 4000), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_narrow_tables_are_parts_of_wide_ones(seed: int, recompute: str, limit: int, reach: int) -> None:
    wide = random_case(random.Random(seed), limit=limit, recompute=recompute)
    reach = min(reach, wide.ranges.pieces)
    narrow = replace(wide, reach=reach)
    for name in ("actions", "optimizer", "allowed", "possible", "least"):
        ours, theirs = np.array(getattr(narrow.tables, name)), np.array(getattr(wide.tables, name))[..., -reach:]
        where = wide.tables.open[:, :, -reach:]
        assert np.array_equal(*(np.where(where, table, 0) for table in (ours, theirs)))


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_a_narrow_case_has_a_bound_too(seed: int) -> None:
    wide = random_case(random.Random(seed), layers=9)
    with mock.patch("autopipe.planning.cases._FEW", 0):
        narrow = wide.narrowed()
        assert narrow.reach <= wide.ranges.pieces
        found = narrow.best
    assert wide.best is not None
    assert found is not None
    assert narrow.lower_bound_s <= wide.best.step_s * (1 + 1e-9)
    assert wide.best.step_s <= found.step_s * (1 + 1e-9)


# replicas ----------------------------------------------------------------------------------------------------------


def test_replicas_are_as_slow_as_the_slowest_of_them() -> None:
    """Two pipelines of two on nodes of three ranks: ranks 0 1 | 2 3, of which 2 and 3 are on different nodes."""
    fast, slow = Link(1.0, 100.0), Link(2.0, 10.0)
    nodes = Cluster(
        "nodes",
        (Device("a", 500, 3), Device("b", 300, 3, 0.5)),
        (Tier("in", 3, fast), Tier("out", 6, slow)),
    )
    seats = Setting(chain([1.0]), nodes, "sgd", (500,) * 3 + (300,) * 3, {}).seats(2, 2)
    assert seats.speeds == (1.0, 0.5)
    assert seats.limits == (500, 300)
    assert seats.hops((0, 1)) == (slow,)
    assert seats.rings == (fast, slow)  # ranks 0 and 2 are on one node, 1 and 3 are not
    assert seats.exchanges_s(1, 80) == 2 * (2.0 + 40 / 10.0)
    summing = replace(
        nodes, tiers=(nodes.tiers[0], Tier("out", 6, replace(slow, reduce_latency_s=3.0, reduce_bytes_per_s=5.0)))
    )
    measured = Setting(chain([1.0]), summing, "sgd", (500,) * 6, {}).seats(2, 2)
    assert measured.exchanges_s(1, 80) == 2 * (3.0 + 40 / 5.0)
    assert measured.exchanges_s(0, 80) == seats.exchanges_s(0, 80)
    assert Setting(chain([1.0]), nodes, "sgd", (500,) * 6, {}).seats(3, 1).hops((0, 1, 2)) == (fast, fast)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_seats_take_the_slowest_link_of_all_replicas(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3)]
    sizes += [sizes[-1] * rng.randint(1, 4), 10**4]
    links = [Link(rng.random(), 1 + rng.random()) for _ in range(4)]
    tiers = tuple(Tier(str(n), size, link) for n, (size, link) in enumerate(zip(sizes, links, strict=False)))
    depth, replicas = rng.randint(1, 6), rng.randint(1, 5)
    pairs = (Pair(0, 1, links[3]),) if rng.random() < 0.5 else ()
    devices = Cluster("any", (Device("d", 1, depth * replicas),), tiers, pairs)
    seats = Setting(chain([1.0]), devices, "sgd", (1,) * (depth * replicas), {}).seats(depth, replicas)

    def worst(ranks: list[tuple[int, int]]) -> Link:
        found = [link for a, b in ranks if (link := devices.link(a, b))]
        return Link(max(link.latency_s for link in found), min(link.bytes_per_s for link in found))

    for rank, hop in enumerate(seats.hops(range(depth))):
        assert hop == worst([(k * depth + rank, k * depth + rank + 1) for k in range(replicas)])
    if replicas > 1:
        for rank, ring in enumerate(seats.rings):
            ranks = [k * depth + rank for k in range(replicas)]
            assert ring == worst(list(zip(ranks, ranks[1:] + ranks[:1], strict=True)))
        least = sum(seats.exchanges_s(rank, 100) for rank in range(depth))
        assert seats.least_reduce_s(100 * depth) <= least * (1 + 1e-9)
