"""Synthesis: the best of all orders where they are few, never worse than the known ones, within memory and tries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopipe.core.errors import UsageError
from autopipe.core.schedule import Action, Op, Order, Schedule, Shape, StageMemory, StageTimes, kind, kinds, place
from autopipe.core.validation import validate
from autopipe.exploring import examine
from autopipe.ordering import annealing
from autopipe.ordering.annealing import annealed, evaluated, merged
from autopipe.ordering.bounds import makespan_bound_s
from autopipe.ordering.compiled import has_numba
from autopipe.ordering.rows import Listed
from autopipe.ordering.stretching import stretched
from autopipe.synthesis import _Search, known_order, synthesize
from tests.synthetic import random_schedule

TRIES = 40

seeds = st.integers(0, 2**32 - 1)


def case(seed: int, *, most_ranks: int = 4) -> tuple[Shape, list[StageTimes], StageMemory]:
    """Uneven stages, hops and memory for one micro-batch or more, drawn at random."""
    rng = random.Random(seed)
    ranks, (number, how) = rng.randint(1, most_ranks), rng.choice([(1, "loop"), (2, "v"), (2, "loop"), (3, "v")])
    placement = place(how, ranks, number)
    hop = rng.choice([0.0, 0.1, 0.4])
    hops = tuple(0.0 if a == b else hop for a, b in pairwise(placement))
    shape = Shape(ranks, rng.randint(1, 6), placement, hops, rng.choice([1.0, 0.5]))
    times = []
    for _ in placement:
        f, i, w = (rng.uniform(0.3, 2) for _ in range(3))
        times.append(StageTimes(f, (i + w) * rng.choice([0.8, 1.0]), i, w))
    return shape, times, StageMemory.of(shape, rng.choice([0.6, 1.0, 2.0]) * ranks + 1)


def rows_of(actions: list[Action]) -> Iterator[tuple[Action, ...]]:
    """All orders of a rank's actions in which F comes before I, I before W, and each stage keeps micro-batch order."""
    for row in permutations(actions):
        places = {action: n for n, action in enumerate(row)}
        in_turn = all(places[Action(a.stage, a.op, a.micro_batch - 1)] < n for a, n in places.items() if a.micro_batch)
        before = {Op.I: Op.F, Op.W: Op.I}
        if in_turn and all(places[a._replace(op=before[a.op])] < n for a, n in places.items() if a.op in before):
            yield row


@pytest.mark.parametrize("cap", [1.0, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_finds_the_best_of_all_orders(seed: int, cap: float) -> None:
    rng = random.Random(seed)
    hop = rng.choice([0.0, 0.5])
    shape = Shape(2, 2, (0, 1), (hop,))
    times = [StageTimes(f, i + w, i, w) for f, i, w in ([rng.uniform(0.5, 2) for _ in range(3)] for _ in range(2))]
    memory = StageMemory.of(shape, cap)
    ways = [[*rows_of([Action(s, op, b) for op in (Op.F, Op.I, Op.W) for b in range(2)])] for s in range(2)]
    made = (makespan(shape, order, times, memory) for order in product(*ways))
    best = min(seconds for seconds in made if seconds is not None)
    found = synthesize(shape, times, memory, tries=300)
    assert found.makespan_s == pytest.approx(best, rel=1e-9)
    assert found.lower_bound_s <= best * (1 + 1e-9)


def makespan(shape: Shape, order: Order, times: list[StageTimes], memory: StageMemory) -> float | None:
    """Seconds of an order, by a simulator of its own; None where it is stuck or does not fit."""
    ends: dict[Action, float] = {}
    free, held, places = [0.0] * shape.ranks, [0.0] * shape.ranks, [0] * shape.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(order):
            while places[rank] < len(row):
                stage, op, _ = action = row[places[rank]]
                arrival = _arrival(shape, ends, action)
                if arrival is None:
                    break
                seconds = dict(zip("FBIW", times[stage], strict=True))[op.value]
                free[rank] = ends[action] = max(free[rank], arrival) + seconds
                kept, left = memory.after_forward[stage], memory.after_input_grad[stage]
                held[rank] += {"F": kept, "B": -kept, "I": left - kept, "W": -left}[op.value]
                if held[rank] > memory.caps[rank] * (1 + 1e-9):
                    return None
                places[rank] += 1
                moved = True
    whole = all(place == len(row) for place, row in zip(places, order, strict=True))
    return max(free) if whole else None


def _arrival(shape: Shape, ends: dict[Action, float], action: Action) -> float | None:
    stage, op, batch = action
    hops = shape.hops_s or (0.0,) * (shape.stages - 1)
    if op is Op.F and stage:
        made, hop = ends.get(Action(stage - 1, Op.F, batch)), hops[stage - 1]
    elif op in (Op.B, Op.I) and stage < shape.stages - 1:
        later = (ends.get(Action(stage + 1, each, batch)) for each in (Op.B, Op.I))
        made, hop = next((end for end in later if end is not None), None), hops[stage]
    else:
        return 0.0
    return None if made is None else made + hop


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_it_is_valid_fits_and_beats_the_known(seed: int) -> None:
    shape, times, memory = case(seed)
    found = synthesize(shape, times, memory, tries=TRIES, seed=seed)
    validate(Schedule("Synthesized", shape.placement, found.order))
    assert makespan(shape, found.order, times, memory) == pytest.approx(found.makespan_s, rel=1e-9)
    assert found.lower_bound_s <= found.makespan_s * (1 + 1e-9)
    assert found.gap >= -1e-9
    for known in kinds("torch"):
        order = known_order(known, shape, times)
        seconds = makespan(shape, order, times, memory) if order else None
        assert seconds is None or found.makespan_s <= seconds * (1 + 1e-9)


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_no_order_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    table = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 5))
    hops = tuple(0.0 if a == b else rng.random() for a, b in pairwise(table.placement))
    shape = Shape(ranks, table.micro_batches, table.placement, hops)
    times = [StageTimes(*(rng.uniform(0.1, 2) for _ in range(4))) for _ in table.placement]
    peaks = examine(table, shape, times).peak_in_flight
    held = replace(StageMemory.of(shape, 1.0), caps=peaks)
    seconds = makespan(shape, table.order, times, held)
    assert seconds is not None
    assert makespan_bound_s(shape, times) <= makespan_bound_s(shape, times, held) <= seconds * (1 + 1e-9)


def test_the_bound_at_equal_stages_is_the_papers() -> None:
    """m(F + I + W) + (p − 1)F where I and W are apart."""
    shape = Shape(4, 8, place("loop", 4, 1))
    assert makespan_bound_s(shape, [StageTimes(1, 2, 1, 1)] * 4) == 8 * 3 + 3
    shape = Shape(4, 8, place("v", 4, 2), (0.25, 0.25, 0.25, 0.0, 0.25, 0.25, 0.25))
    assert makespan_bound_s(shape, [StageTimes(0.5, 1, 0.5, 0.5)] * 8) == 8 * 3 + 3 * 0.75


def test_the_bound_in_little_memory_is_what_is_reached() -> None:
    """m(F + I + W) + (p − 1)(F + I − W), ZB-H1's, in the memory of p micro-batches with one stage on a rank.

    In the memory of 3 of 2 ranks: the last I goes back to rank 0 while rank 1 has two W left, which are too short.
    """
    shape, times = Shape(4, 8, place("loop", 4, 1)), [StageTimes(3, 3, 2, 1)] * 4
    memory = StageMemory.of(shape, 4)
    assert makespan_bound_s(shape, times, memory) == 8 * 6 + 3 * 4
    order = known_order(kind("ZB-H1"), shape, times)
    made = evaluated(shape, order, times, memory) if order else None
    assert made is not None
    assert made.makespan_s == 8 * 6 + 3 * 4
    shape, times = Shape(2, 8, (0, 1)), [StageTimes(4, 7, 6, 1)] * 2
    assert makespan_bound_s(shape, times, StageMemory.of(shape, 3)) == 4 + 8 * 11 + 6 + 1 - 3


def test_too_little_memory_is_an_error() -> None:
    shape = Shape(2, 2, (0, 1))
    with pytest.raises(UsageError, match="one micro-batch does not fit on some rank of 2"):
        synthesize(shape, [StageTimes(1, 2, 1, 1)] * 2, StageMemory.of(shape, 0.5))


def test_equal_arguments_give_equal_orders() -> None:
    shape, times, memory = case(7)
    assert synthesize(shape, times, memory, tries=60).order == synthesize(shape, times, memory, tries=60).order


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_annealing_keeps_what_holds(seed: int) -> None:
    shape, times, memory = case(seed)
    order = known_order(kind("GPipe"), shape, times) or known_order(kind("LoopedBFS"), shape, times)
    found = evaluated(shape, order, times, memory) if order else None
    assume(found is not None)
    better = annealed(found, times, memory, tries=200, seed=seed)
    assert better.makespan_s <= found.makespan_s
    assert makespan(shape, better.order, times, memory) == pytest.approx(better.makespan_s, rel=1e-9)
    validate(Schedule("annealed", shape.placement, better.order))
    joined = merged(better, times, memory)
    assert joined.makespan_s <= better.makespan_s
    validate(Schedule("merged", shape.placement, joined.order))


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_orders_are_evaluated_as_they_are(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    table = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 4))
    hops = tuple(0.0 if a == b else rng.random() for a, b in pairwise(table.placement))
    shape = Shape(ranks, table.micro_batches, table.placement, hops, rng.choice([1.0, 0.4, 1.5]))
    times = [StageTimes(*(rng.uniform(0.1, 2) for _ in range(4))) for _ in table.placement]
    memory = StageMemory.of(shape, rng.choice([1.0, 2.0, 9.0]))
    found = evaluated(shape, table.order, times, memory)
    seconds = makespan(shape, table.order, times, memory)
    assert (found is None) == (seconds is None)
    if found:
        assert found.order == table.order
        assert found.makespan_s == pytest.approx(seconds, rel=1e-12)


@pytest.mark.skipif(not has_numba(), reason="numba is an extra: pip install autopipe[fast]")
@pytest.mark.slow
def test_machine_code_gives_the_same_orders() -> None:
    for seed in range(8):
        shape, times, memory = case(seed)
        plain = synthesize(shape, times, memory, tries=60)
        fast = synthesize(shape, times, memory, tries=60, fast=True)
        assert (fast.order, fast.origin) == (plain.order, plain.origin)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_times_are_kept_up_to_date_by_moves(seed: int) -> None:
    """After moves, when actions begin and what comes behind them is what a look at all of the rows gives."""
    shape, times, memory = case(seed)
    order = known_order(kind("GPipe"), shape, times) or known_order(kind("LoopedBFS"), shape, times)
    found = evaluated(shape, order, times, replace(memory, caps=(9.0,) * shape.ranks)) if order else None
    assume(found is not None)
    given, moved = annealing._given(found, times, memory, False), annealing._state(found, seed, False)
    moved.spans[0] = moved.spans[1] = annealing.moves.measure(given, moved)
    assume(moved.spans[0] >= 0)
    annealing.moves.anneal(given, moved, 0, 300, 300, 12, 0.05)
    anew = annealing._state(found, seed, False)._replace(rows=list(moved.rows))
    assert annealing.moves.measure(given, anew) == pytest.approx(moved.spans[0], rel=1e-12)
    annealing.moves.anneal(given, anew, 0, 0, 1, 12, 0.0)
    codes = moved.rows
    for kept, seen in ((moved.begins, anew.begins), (moved.ends, anew.ends), (moved.afters, anew.afters)):
        assert [kept[code] for code in codes] == pytest.approx([seen[code] for code in codes], rel=1e-12)
    assert moved.held == pytest.approx(anew.held, abs=1e-9)
    assert [moved.places[code] for code in codes] == [*range(len(codes))]


def test_a_steady_state_repeats() -> None:
    """The drawing of stretching.py."""
    shape, times = Shape(2, 3, (0, 1)), [StageTimes(1, 2, 1, 1)] * 2
    memory = StageMemory.of(shape, 2)
    order = known_order(kind("ZB-H1"), shape, times)
    few = evaluated(shape, order, times, memory) if order else None
    assert few is not None
    assert " ".join(map(str, few.order[0])) == "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2"
    (made,) = filter(None, stretched(few, replace(shape, micro_batches=5), times, memory))
    wanted = "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0F4 0I3 0W3 0I4 0W4"
    assert " ".join(map(str, made.order[0])) == wanted
    assert made.makespan_s == 5 * 3 + 2


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_what_is_stretched_is_valid_and_fits(seed: int) -> None:
    shape, times, memory = case(seed)
    few = _Search(shape, times, memory, TRIES, None, seed, False, inner=True).best
    assert few is not None
    many = replace(shape, micro_batches=shape.micro_batches + 4)
    for made in filter(None, stretched(few, many, times, memory)):
        validate(Schedule("stretched", shape.placement, made.order))
        assert makespan(many, made.order, times, memory) == pytest.approx(made.makespan_s, rel=1e-9)


def test_a_listed_order_is_made_of_actions() -> None:
    made = Listed(Shape(1, 2, (0,)), ([0, 2, 3, 5],), 4.0, 4.0)
    assert [str(action) for action in made.order[0]] == ["0F0", "0I0", "0I1", "0W1"]
