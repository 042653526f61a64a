"""Orders made for the stages of a split: never slower than those for equal stages, within memory, in the plan."""

from __future__ import annotations

import pytest

from autopipe.core.schedule import kind
from autopipe.core.validation import validate
from autopipe.planning.cases import Case
from autopipe.planning.keys import Key
from autopipe.planning.outcome import outcome
from autopipe.planning.ranges import Ranges
from autopipe.planning.remaking import Choice, memory_for, placed_as, settled, shape_for
from autopipe.planning.setting import Setting
from autopipe.planning.space import Space
from autopipe.search import plan
from tests.synthetic import chain, cluster

UNEVEN = [0.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.5]


def case(
    name: str, stages_per_rank: int, *, ranks: int = 2, batches: int = 6, limit: int = 10**9, held: int = 10
) -> Case:
    """A case whose order is made for equal stages, of a model with a dear last layer."""
    profile = chain(UNEVEN, held_bytes=held, output_elements=1)
    setting = Setting(profile, cluster(ranks), "adamw", (limit,) * ranks, {})
    table = kind(name).schedule(ranks, batches, stages_per_rank=stages_per_rank)
    return Case.of(setting, Ranges.of(profile, 1, optimizer="adamw"), table, 1, "none")


def made(given: Case) -> Choice | None:
    """Its best split, with the order for it."""
    named = kind(given.schedule.name)
    return settled(placed_as(given, named), named)


@pytest.mark.parametrize(
    ("name", "number"), [("ZB-H1", 1), ("ZB-1p", 1), ("ZB-V", 2), ("V-Half", 2), ("Synthesized", 2)]
)
def test_an_order_for_the_stages_is_no_slower(name: str, number: int) -> None:
    before = case(name, number)
    found = made(before)
    assert found is not None
    assert before.best is not None
    assert found.found.step_s <= before.best.step_s
    validate(found.case.schedule)
    again = outcome(found.case, found.found.positions)
    assert again.timeline.step_s == pytest.approx(found.found.step_s, rel=1e-6)


def test_synthesized_gains_on_uneven_stages() -> None:
    before = case("Synthesized", 1)
    found = made(before)
    known = made(case("1F1B", 1))
    assert found is not None
    assert known is not None
    assert found.found.step_s < known.found.step_s


def test_a_schedule_that_does_not_look_is_left_as_it_is() -> None:
    before = case("1F1B", 1)
    found = made(before)
    assert found is not None
    assert found.case is before


def test_the_limit_is_kept_where_the_order_for_equal_stages_exceeds_it() -> None:
    """1F1B's warm-up does not fit here; an order with fewer micro-batches in flight does."""
    tight = case("Synthesized", 1, ranks=3, held=100, limit=500)
    assert tight.best is None
    found = made(tight)
    assert found is not None
    assert found.found.bytes <= 500
    assert made(case("1F1B", 1, ranks=3, held=100, limit=500)) is None


@pytest.mark.parametrize("limit", [600, 700, 900])
def test_in_little_memory_no_known_schedule_is_faster_than_an_order_made_for_it(limit: int) -> None:
    found = made(case("Synthesized", 2, held=100, limit=limit))
    assert found is not None
    assert found.found.bytes <= limit
    known = [made(case(name, 2, held=100, limit=limit)) for name in ("V-Half", "V-Min", "ZB-V")]
    assert all(found.found.step_s <= other.found.step_s * (1 + 1e-9) for other in known if other)


def test_memory_is_what_the_limit_leaves() -> None:
    """A micro-batch holds 40 bytes and what crosses, 4 a boundary; what is on its way comes off the limit."""
    given = case("1F1B", 1, limit=1000, held=10)
    costs = outcome(given, (0, 4, 8)).costs
    memory = memory_for(given, costs)
    assert memory.after_forward == (44, 44)
    assert memory.after_input_grad == (24, 24)
    assert memory.caps == (1000 - 4, 1000 - 3 * 4)
    assert shape_for(given, costs).weight_part == 0.5


def test_a_plan_takes_the_order_that_was_made_for_it() -> None:
    made = plan(chain(UNEVEN, held_bytes=10), cluster(2), global_batch=6, depths=[2], schedules=["Synthesized"])
    assert made.schedule.name == "Synthesized"
    assert made.predicted.step_s >= made.lower_bound_s * (1 - 1e-9)
    named = plan(chain(UNEVEN, held_bytes=10), cluster(2), global_batch=6, depths=[2], schedules=["all"])
    assert named.predicted.step_s <= made.predicted.step_s * (1 + 1e-9)


def test_where_nothing_recomputes_the_same_plan_is_not_sought_twice() -> None:
    plain = Key(2, 1, 1, kind("Interleaved1F1B"), 2, "none")
    again = plain._replace(recompute="auto")
    loose, tight = (space_of("Interleaved1F1B", limit) for limit in (10**9, 120))
    assert loose.choice(plain) is not None
    assert loose.choice(again) is loose.choice(plain)
    assert tight.choice(plain) is not None
    assert tight.choice(again) is not tight.choice(plain)


def test_what_is_far_behind_gets_no_order_of_its_own() -> None:
    key = Key(2, 1, 1, kind("ZB-H1"), 1, "auto")
    space = space_of("ZB-H1", 10**9)
    best = space_of("ZB-H1", 10**9).choice(key)
    assert best is not None
    assert not space.behind(key, best)
    assert space.behind(key, best._replace(found=best.found._replace(step_s=best.found.step_s / 2)))


@pytest.mark.parametrize(("limit", "far"), [(10**9, True), (120, False)])
def test_what_takes_any_order_is_too_far_behind_only_where_memory_is_plenty(limit: int, far: bool) -> None:
    key, space = Key(2, 1, 1, kind("Synthesized"), 2, "auto"), space_of("Synthesized", limit)
    best = space_of("Synthesized", limit).choice(key)
    assert best is not None
    assert space.behind(key, best._replace(found=best.found._replace(step_s=best.found.step_s / 2))) == far


def space_of(name: str, limit: int) -> Space:
    """The plans of a schedule on two ranks."""
    profile = chain(UNEVEN, held_bytes=10, output_elements=1)
    setting = Setting(profile, cluster(2), "adamw", (limit,) * 2, {})
    return Space(setting, 6, (2,), (1,), (1,), (kind(name),), "auto")
