from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.errors import ScheduleError
from autopipe.core.schedule import Action, Op, Schedule, kind
from autopipe.core.validation import sequence, validate
from tests.synthetic import random_schedule


def table(*rows: str, placement: tuple[int, ...] | None = None, executor: str = "torch", **more: Any) -> Schedule:
    order = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Schedule("hand-made", placement or tuple(range(len(rows))), order, executor, **more)


def two_way(*rows: str, executor: str = "own", parts: tuple[int, ...] = (0, 1, 0, 1)) -> Schedule:
    return table(*rows, placement=(0, 1, 1, 0), executor=executor, parts=parts)


def stale(*rows: str, weights: str = "stashed", executor: str = "own") -> Schedule:
    return table(*rows, weights=weights, executor=executor)


STALE = ("0F0 0F1 0B0 0O0 0B1 0O1", "1F0 1B0 1O0 1F1 1B1 1O1")
TWO_WAY = ("0F0 3F1 3B1 0B0", "2F1 1F0 1B0 2B1")


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")

BROKEN = {
    "missing backward": (table("0F0 0F1 0B0", GOOD[1]), "rank 0: stage 0, micro-batch 1 has F: it needs F and B"),
    "missing forward": (table("0F0 0B0 0B1", GOOD[1]), "rank 0: stage 0, micro-batch 1 has B"),
    "missing micro-batch": (table("0F0 0B0", GOOD[1]), "rank 0: stage 0, micro-batch 1 has nothing"),
    "both kinds of backward": (table("0F0 0F1 0B0 0B1 0I1 0W1", GOOD[1]), "micro-batch 1 has F B I W"),
    "no weight gradient": (table("0F0 0F1 0B0 0I1", GOOD[1]), "micro-batch 1 has F I"),
    "twice": (table("0F0 0F1 0B0 0B1 0B1", GOOD[1]), "rank 0: 0B1 is there 2 times"),
    "wrong rank": (table(GOOD[0] + " 1B1", "1F0 1B0 1F1"), "rank 0: 1B1 belongs to rank 1"),
    "no such stage": (table(GOOD[0] + " 2F0", GOOD[1]), "rank 0: 2F0 names a stage that does not exist: there are 2"),
    "backward first": (table("0B0 0F0 0F1 0B1", GOOD[1]), "rank 0: 0B0 comes before 0F0"),
    "W before I": (table("0F0 0F1 0W0 0I0 0B1", GOOD[1]), "rank 0: 0W0 comes before 0I0"),
    "I before F": (table("0F1 0I0 0F0 0W0 0B1", GOOD[1]), "rank 0: 0I0 comes before 0F0"),
    "optimizer": (table(GOOD[0] + " 0O0", GOOD[1]), "rank 0: 0O0 is an optimizer step"),
    "last stage out of order": (table(GOOD[0], "1F1 1B1 1F0 1B0"), "rank 1: 1F1 comes where 1F0 is due"),
    "rank without a stage": (table(*GOOD, "", placement=(0, 1)), "rank 2: no stage is placed here"),
    "stage without a rank": (table(*GOOD, placement=(0, 3)), "rank 3: stage 1 is placed on a rank that has no row"),
    "micro-batch both ways": (two_way("0F0 3F1 3B1 0B0", "2F1 1F0 1B0 2B1 2F0"), "replica of 0"),
    "step too early": (stale("0F0 0F1 0O0 0B0 0B1 0O1", STALE[1]), "rank 0: 0O0 is there after 0 gradients and 0"),
    "step missing": (stale("0F0 0F1 0B0 0B1", STALE[1]), "rank 0: 0B1 is not of update 0"),
    "last step missing": (stale("0F0 0F1 0B0 0O0 0B1", STALE[1]), "rank 0: the row has 1 optimizer steps"),
    "gradients of two updates": (
        stale("0F0 0F1 0F2 0B0 0B2 0O0 0B1 0B3 0F3 0O1", "1F0 1F1 1F2 1F3 1B0 1B1 1O0 1B2 1B3 1O1"),
        "rank 0: 0B3 comes before 0F3",
    ),
    "deadlock": (table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), "rank 0: 0B0 waits for 1B0 for ever: rank 1 stands at"),
}


@pytest.mark.parametrize(("broken", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_tables_name_rank_action_reason_and_show_the_grid(broken: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(broken)
    assert message in str(caught.value)
    assert str(caught.value).endswith(broken.grid())


WRONG = {
    "two ways on torch": (two_way(*TWO_WAY, executor="torch"), "torch's runtime has no two replicas"),
    "broken parts": (two_way(*TWO_WAY, parts=(0, 1, 1, 0)), "parts (0, 1, 1, 0) are not 0, 1, …"),
    "stale on torch": (stale(*STALE, executor="torch"), "torch's runtime has no updates without a flush"),
    "unknown policy": (stale(*STALE, weights="fresh"), "weights 'fresh': use one of flush, stashed"),
    "version not made yet": (
        stale("0F0 0F1 0F2 0B0 0O0 0B1 0O1 0B2 0O2", "1F0 1B0 1O0 1F1 1B1 1O1 1F2 1B2 1O2", weights="double"),
        "0F2 needs version 1 of the weights, but runs when the newest is 0",
    ),
}
"""Wrong as a whole, whatever the rows say."""


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_tables_that_no_executor_runs(wrong: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(wrong)


def test_both_ways_and_stale_tables_are_valid() -> None:
    validate(two_way(*TWO_WAY))
    validate(stale(*STALE))


def test_the_good_table_is_valid() -> None:
    validate(table(*GOOD))
    validate(table("0F0 0F1 0I0 0I1 0W1 0W0", GOOD[1]))


def test_only_torch_needs_the_last_stage_in_order() -> None:
    validate(table(GOOD[0], "1F1 1B1 1F0 1B0", executor="own"))


def test_stages_that_may_not_split() -> None:
    split = table("0F0 0F1 0I0 0I1 0W1 0W0", GOOD[1])
    validate(split, can_split_backward=[True, False])
    with pytest.raises(ScheduleError, match=r"rank 0: 0I0 splits the backward of stage 0"):
        validate(split, can_split_backward=[False, True])


def test_long_rows_are_shortened_in_errors() -> None:
    long = kind("GPipe").schedule(2, 500)
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("long", long.placement, (long.order[0][:-1], long.order[1])))
    assert len(str(caught.value)) < 1000


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
@settings(max_examples=60)
def test_random_valid_tables_pass(seed: int) -> None:
    validate(_random(seed))


@given(seeds, st.sampled_from(["drop", "swap", "double", "move"]))
@settings(max_examples=100)
def test_what_passes_can_run_and_what_fails_cannot(seed: int, change: str) -> None:
    """A changed table passes exactly where an independent check says so."""
    changed = _changed(_random(seed), random.Random(seed), change)
    try:
        validate(changed)
        passes = True
    except ScheduleError:
        passes = False
    assert passes == _runs(changed)


@given(seeds)
@settings(max_examples=60)
def test_blocking_transfers_never_deadlock(seed: int) -> None:
    _run_with_blocking_transfers(_lowered(_random(seed)))


def test_blocking_transfers_do_deadlock_in_a_crossed_lowering() -> None:
    """The check above can fail: a receive before the send that its value depends on blocks for ever."""
    lowered = _lowered(table(*GOOD))
    lowered[0][3], lowered[0][4] = lowered[0][4], lowered[0][3]
    with pytest.raises(AssertionError):
        _run_with_blocking_transfers(lowered)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_torch_lowers_every_valid_table(seed: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = _random(seed)
    actions = {rank: [schedules._Action.from_str(str(a)) for a in row] for rank, row in enumerate(made.order)}
    lowered = schedules._add_send_recv(actions, lambda stage: made.placement[stage], made.stages)
    ours = [[str(item) for item in row if isinstance(item, Action)] for row in _lowered(made)]
    theirs = [[str(a) for a in lowered[rank] if a.computation_type.name in _COMPUTE] for rank in range(made.ranks)]
    assert ours == theirs


_COMPUTE = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"}


def _random(seed: int) -> Schedule:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    return random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 4))


def _changed(made: Schedule, rng: random.Random, change: str) -> Schedule:
    rows = [list(row) for row in made.order]
    row = rng.choice(rows)
    a, b = rng.randrange(len(row)), rng.randrange(len(row))
    edits: dict[str, Callable[[], object]] = {
        "drop": lambda: row.pop(a),
        "swap": lambda: row.__setitem__(slice(None), [row[{a: b, b: a}.get(k, k)] for k in range(len(row))]),
        "double": lambda: row.insert(b, row[a]),
        "move": lambda: row.insert(b, row.pop(a)),
    }
    edits[change]()
    return Schedule("changed", made.placement, tuple(map(tuple, rows)))


def _runs(made: Schedule) -> bool:
    """Whether every rank gets to the end of its row, each need checked by name, and all work is there."""
    done: set[Action] = set()
    places = [0] * made.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(made.order):
            if places[rank] < len(row) and _possible(row[places[rank]], done, made.stages):
                done.add(row[places[rank]])
                places[rank] += 1
                moved = True
    finished = all(place == len(row) for place, row in zip(places, made.order, strict=True))
    flat = [action for row in made.order for action in row]
    batches = range(made.micro_batches)
    whole = len(flat) == len(set(flat)) and all(_complete(s, b, done) for s in range(made.stages) for b in batches)
    forwards = [a.micro_batch for a in flat if a.stage == made.stages - 1 and a.op is Op.F]
    return finished and whole and forwards == sorted(forwards)


def _possible(action: Action, done: set[Action], stages: int) -> bool:
    stage, op, batch = action
    forward, later = Action(stage, Op.F, batch), (Action(stage + 1, Op.B, batch), Action(stage + 1, Op.I, batch))
    if op is Op.F:
        return stage == 0 or Action(stage - 1, Op.F, batch) in done
    if op is Op.W:
        return Action(stage, Op.I, batch) in done
    return forward in done and (stage == stages - 1 or any(a in done for a in later))


def _complete(stage: int, batch: int, done: set[Action]) -> bool:
    ops = {op for op in Op if Action(stage, op, batch) in done}
    return ops in ({Op.F, Op.B}, {Op.F, Op.I, Op.W})


Lowered = list[list["Action | tuple[str, int, Action]"]]


def _lowered(made: Schedule) -> Lowered:
    """As torch does it: behind an action its send, and at that moment the receive on the other rank."""
    rows: Lowered = [[] for _ in range(made.ranks)]
    for rank, place in sequence(made):
        action = made.order[rank][place]
        rows[rank].append(action)
        towards = action.stage + (1 if action.op is Op.F else -1)
        if action.op is not Op.W and 0 <= towards < made.stages and made.placement[towards] != rank:
            rows[rank].append(("send", made.placement[towards], action))
            rows[made.placement[towards]].append(("receive", rank, action))
    return rows


def _run_with_blocking_transfers(rows: Lowered) -> None:
    """Send and receive each block until the other side is there; fails when nothing can move any more."""
    places = [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        heads = [row[place] if place < len(row) else None for place, row in zip(places, rows, strict=True)]
        moved = [rank for rank, head in enumerate(heads) if isinstance(head, Action)]
        for rank, head in enumerate(heads):
            if isinstance(head, tuple) and head[0] == "send" and heads[head[1]] == ("receive", rank, head[2]):
                moved += [rank, head[1]]
        assert moved, "deadlock"
        for rank in moved:
            places[rank] += 1
