"""One bound for pipelines of all depths, against every split and every choice of layers to recompute."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401  registers them
from autopipe.core.cluster import Link
from autopipe.core.in_flight import Kept
from autopipe.core.profile import Profile
from autopipe.core.schedule import Shape, kind
from autopipe.planning.bounds import rooms
from autopipe.planning.cases import Case
from autopipe.planning.family import Family, family, sharp_family
from autopipe.planning.needs import Fit, Moment, Place
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.recompute import fit
from autopipe.planning.setting import Setting
from autopipe.planning.tables import from_begin, least_extras, places
from autopipe.solvers.brute import splits
from tests.synthetic import chain, cluster
from tests.test_planning import random_profile, simulated

seeds = st.integers(0, 2**32 - 1)


def outline(name: str, depth: int, batches: int) -> Outline:
    """A schedule's, without its order."""
    ahead = kind(name).ahead
    assert ahead is not None
    return Outline.in_turn(name, batches, ahead(Shape(depth, batches, tuple(range(depth)))))


def made(
    profile: Profile, name: str, depths: tuple[int, int], batches: int, limit: int, link: Link
) -> tuple[Case, list[Family]]:
    """A case, and the families of one that is as deep or deeper: the quick and the sharp one."""
    depth, deepest = depths
    setting = Setting(profile, cluster(deepest, link=link), "adamw", (limit,) * deepest, {})
    ranges = Ranges.of(profile, 1, optimizer="adamw")
    order = kind(name).schedule(depth, batches)
    case = Case(setting, ranges, outline(name, depth, batches), lambda: order, 1, "auto")
    whole = outline(name, deepest, batches)
    given_ = setting, ranges, whole, setting.seats(deepest)
    return case, [make(*given_, reach=ranges.pieces, may_recompute=True) for make in (family, sharp_family)]


@given(seeds, st.sampled_from(["1F1B", "GPipe"]), st.floats(0.3, 1.1))
@settings(max_examples=60, deadline=None)
def test_nothing_beats_the_bound_of_a_family(seed: int, name: str, part: float) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(1, 5))
    pieces = len(profile.legal_cuts()) + 1
    depth = rng.randint(1, pieces)
    given_ = name, (depth, rng.randint(depth, pieces)), rng.randint(1, 5)
    link = Link(rng.choice([0.0, 0.2]), rng.choice([50.0, 1e9]))
    free, _ = made(profile, *given_, 2**40, link)
    limit = int(part * min(max(simulated(free, p, ()).peak_bytes) for p in splits(pieces, depth)))
    case, both = made(profile, *given_, limit, link)
    bounds = [each.bound_s(case.outline.ahead) for each in both]
    assert min(bounds) > 0
    bound = max(bounds)
    for positions in splits(pieces, depth):
        for again in itertools.product((False, True), repeat=len(profile.layers)):
            line = simulated(case, positions, tuple(itertools.compress(range(len(again)), again)))
            if all(peak <= limit for peak in line.peak_bytes):
                assert line.step_s >= bound * (1 - 1e-9)


@given(seeds, st.sampled_from(["1F1B", "GPipe"]), st.integers(0, 99), st.booleans())
@settings(max_examples=60, deadline=None)
def test_nothing_fits_where_there_is_no_room(seed: int, name: str, more: int, again: bool) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(1, 5))
    pieces, batches = len(profile.legal_cuts()) + 1, rng.randint(1, 5)
    depth = rng.randint(1, pieces)
    free, _ = made(profile, name, (depth, pieces), batches, 2**40, Link(0.0, 1e9))
    lines = [
        simulated(free, positions, tuple(itertools.compress(range(len(chosen)), chosen)))
        for positions in splits(pieces, depth)
        for chosen in itertools.product((False, True) if again else (False,), repeat=len(profile.layers))
    ]
    enough = min(max(line.peak_bytes) for line in lines)

    def might(limit: int) -> bool:
        setting = Setting(profile, cluster(pieces), "adamw", (limit,) * pieces, {})
        where = places(outline(name, pieces, batches), setting.seats(pieces), shared=again)
        return [*rooms(free.ranges, where, may_recompute=again)][depth - 1]

    assert might(enough + more)
    assert not might(profile.layers[0].parameter_bytes)


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_equal_stages_meet_it_at_every_depth(name: str) -> None:
    for depth in (1, 2, 4):
        case, both = made(chain([1.0] * depth), name, (depth, depth), 8, 2**40, Link(0.0, 1e18))
        assert case.best is not None
        for each in both:
            assert each.bound_s(case.outline.ahead) == pytest.approx(case.best.step_s)


def test_what_is_no_part_of_a_family_has_no_bound() -> None:
    _, both = made(chain([1.0] * 4), "1F1B", (2, 4), 8, 2**40, Link(0.0, 1e18))
    other, _ = made(chain([1.0] * 4), "GPipe", (4, 4), 8, 2**40, Link(0.0, 1e18))
    for each in both:
        assert each.bound_s(other.outline.ahead) == 0.0
        assert each.bound_s((5, *each.ahead)) == 0.0


@given(seeds, st.sampled_from(["1F1B", "GPipe"]), st.floats(0.3, 1.1))
@settings(max_examples=30, deadline=None)
def test_a_family_that_grew_is_the_one_made_at_once(seed: int, name: str, part: float) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(2, 7))
    pieces, batches = len(profile.legal_cuts()) + 1, rng.randint(1, 5)
    free = Setting(profile, cluster(pieces, link=Link(0.1, 50.0)), "adamw", (2**40,) * pieces, {})
    limit = int(part * Ranges.of(profile, 1, optimizer="adamw").static[0, -1]) + 100
    setting, ranges = replace(free, limits=(limit,) * pieces), Ranges.of(profile, 1, optimizer="adamw")
    reaches = sorted(rng.randint(1, pieces) for _ in range(2))

    def of(depth: int, known: Family | None, reach: int, from_: Ranges) -> Family:
        given_ = setting, from_, outline(name, depth, batches), setting.seats(depth)
        return family(*given_, reach=reach, may_recompute=True, shallower=known)

    for reach in reaches:  # the second one goes on with the tables of the first
        grown = None
        for depth in sorted({rng.randint(1, pieces), pieces}):
            grown = of(depth, grown, reach, ranges)
        assert grown is not None
        once = of(pieces, None, reach, Ranges.of(profile, 1, optimizer="adamw"))
        assert (grown.ahead, grown.bounds_s) == (once.ahead, once.bounds_s)


@given(seeds, st.integers(50, 400))
@settings(max_examples=30, deadline=None)
def test_the_least_that_recomputes_is_that_of_the_whole_answer(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    ranges = Ranges.of(random_profile(rng, rng.randint(2, 7)), 1, optimizer="adamw")
    places = [Place(limit, (Moment(count, 0, True, False),), Kept(1, 1)) for count in (1, 3)]
    starts, stops, real = from_begin(ranges.pieces, ranges.pieces)
    least = least_extras(ranges, places, ranges.pieces, may_recompute=True)
    whole = fit(ranges, starts[None], stops[None], places, may_recompute=True).least_extra
    for place, expected in zip(places, whole, strict=True):
        assert (least[place] == np.where(real, expected, np.inf)).all()


@given(seeds, st.integers(50, 400))
@settings(max_examples=60, deadline=None)
def test_what_fits_nowhere_has_its_smallest_peak(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    ranges = Ranges.of(random_profile(rng, rng.randint(2, 7)), 1, optimizer="adamw")
    start = rng.randint(0, ranges.pieces - 1)
    spot = np.array([[start]]), np.array([[rng.randint(start + 1, ranges.pieces)]])

    def at(bytes_: int) -> Fit:
        where = [Place(bytes_, (Moment(2, 0, True, True),), Kept(1, 1))]
        return fit(ranges, *spot, where, may_recompute=True, smallest=True)

    found = at(limit)
    assert found.fits.all() == (found.peak_bytes <= limit).all()
    if not found.fits.all():
        peak = int(found.peak_bytes[0, 0])
        assert at(peak).fits.all()
        assert not at(peak - 1).fits.any()
