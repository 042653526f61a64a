"""Whether an action table can run: complete, in order, on its ranks, by the runtime's rules, without deadlock.

Torch's runtime adds the transfers to a table: each one behind the action that makes the value, on both ranks at the
same moment of one common sequence. So whenever such a sequence exists, every rank meets its transfers in the order
of that sequence, and none waits for ever, even when both sides of each transfer block until the other is there.
``sequence`` finds one, or says which actions wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, NoReturn

from autopipe.core.errors import ScheduleError
from autopipe.core.schedule import Action, Op, Schedule

_SHOWN = 48
"""Actions of a row that an error's grid shows."""


def validate(
    schedule: Schedule, *, can_split_backward: Sequence[bool] | None = None, forward_only: bool = False
) -> None:
    """Raise ScheduleError, with rank, action, reason and the table, unless the schedule can run.

    ``can_split_backward`` says of each stage whether its backward may be split into I and W; None means all may.
    With ``forward_only`` the table is for evaluation: it holds forwards and nothing else.
    """
    _check_placement(schedule)
    _check_actions(schedule, can_split_backward)
    _check_complete(schedule, forward_only)
    _check_stage_order(schedule)
    if schedule.executor == "torch":
        _check_last_stage(schedule)
    for _ in sequence(schedule):
        pass


def sequence(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Rank and place in its row, in an order in which every value is made before it is needed.

    Raises ScheduleError where the actions wait for each other. Each row's own order is taken as it is.
    """
    rows = values(schedule)
    there = bytearray(2 * schedule.stages * schedule.micro_batches) + b"\1"  # the last one, number −1, is no value
    places = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row) and there[row[places[rank]].needed]:
                there[row[places[rank]].made] = 1
                places[rank] += 1
                moved = True
                yield rank, places[rank] - 1
    if any(place < len(row) for place, row in zip(places, rows, strict=True)):
        _deadlock(schedule, places)


class Values(NamedTuple):
    """The numbers of the values that an action makes for another stage and needs from one; −1 for none."""

    made: int
    needed: int


def values(schedule: Schedule) -> list[list[Values]]:
    """For each action of each row its values: activations F makes, gradients B or I makes, by stage and micro-batch."""
    count, last = schedule.micro_batches, schedule.stages - 1

    def of(action: Action) -> Values:
        stage, op, batch = action
        if op is Op.F:
            return Values(2 * stage * count + batch, 2 * (stage - 1) * count + batch if stage else -1)
        if op in (Op.B, Op.I):
            made = (2 * stage + 1) * count + batch
            return Values(made, made + 2 * count if stage < last else -1)
        return Values(-1, -1)

    return [[of(action) for action in row] for row in schedule.order]


def _fail(schedule: Schedule, rank: int, action: Action | str, reason: str) -> NoReturn:
    rows = []
    for number, row in enumerate(schedule.order):
        more = " …" if len(row) > _SHOWN else ""
        rows.append(f"rank {number}   {' '.join(map(str, islice(row, _SHOWN)))}{more}")
    raise ScheduleError("\n".join([f"{schedule.name}: rank {rank}: {action} {reason}", *rows]))


def _deadlock(schedule: Schedule, places: list[int]) -> NoReturn:
    heads = [(rank, row[places[rank]]) for rank, row in enumerate(schedule.order) if places[rank] < len(row)]
    (rank, action), *rest = heads
    others = "; ".join(f"rank {r} stands at {a}, which waits for {_awaited(a, schedule)}" for r, a in rest)
    _fail(schedule, rank, action, f"waits for {_awaited(action, schedule)} for ever: {others or 'nobody runs it'}")


def _awaited(action: Action, schedule: Schedule) -> Action:
    """The action of another stage that this one needs."""
    if action.op is Op.F:
        return Action(action.stage - 1, Op.F, action.micro_batch)
    split = Action(action.stage + 1, Op.I, action.micro_batch)
    return split if any(split in row for row in schedule.order) else split._replace(op=Op.B)


def _check_placement(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.ranks:
            _fail(schedule, rank, f"stage {stage}", f"is placed on a rank that has no row: there are {schedule.ranks}")
    for rank in range(schedule.ranks):
        if rank not in schedule.placement:
            _fail(schedule, rank, "no stage", "is placed here: every rank needs one")


def _check_actions(schedule: Schedule, can_split: Sequence[bool] | None) -> None:
    for rank, row in enumerate(schedule.order):
        for action in row:
            if not 0 <= action.stage < schedule.stages:
                _fail(schedule, rank, action, f"names a stage that does not exist: there are {schedule.stages}")
            where = schedule.placement[action.stage]
            if where != rank:
                _fail(schedule, rank, action, f"belongs to rank {where}, which holds stage {action.stage}")
            if action.op is Op.O and schedule.executor == "torch":
                _fail(schedule, rank, action, "is an optimizer step, which comes after the table and is not in it")
            if action.op in (Op.I, Op.W) and can_split is not None and not can_split[action.stage]:
                _fail(schedule, rank, action, f"splits the backward of stage {action.stage}, which must stay whole (B)")


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    """Every stage runs F, and B or I and W unless ``forward_only``, of every micro-batch exactly once."""
    counts = Counter(action for row in schedule.order for action in row)
    for action, count in counts.items():
        if count > 1:
            _fail(schedule, schedule.placement[action.stage], action, f"is there {count} times, once is right")
    for stage, rank in enumerate(schedule.placement):
        for batch in range(schedule.micro_batches):
            has = {op for op in Op if Action(stage, op, batch) in counts} - {Op.O}
            if has not in (({Op.F},) if forward_only else ({Op.F, Op.B}, {Op.F, Op.I, Op.W})):
                found = " ".join(op.value for op in Op if op in has) or "nothing"
                what = f"stage {stage}, micro-batch {batch}"
                needs = "F and nothing else" if forward_only else "F and B, or F, I and W"
                _fail(schedule, rank, what, f"has {found}: it needs {needs}")


def _check_stage_order(schedule: Schedule) -> None:
    """F comes before B and I, and I before W, of the same stage and micro-batch."""
    before = {Op.B: Op.F, Op.I: Op.F, Op.W: Op.I}
    for rank, row in enumerate(schedule.order):
        seen: set[Action] = set()
        for action in row:
            first = before.get(action.op)
            if first is not None and action._replace(op=first) not in seen:
                _fail(schedule, rank, action, f"comes before {action._replace(op=first)}, which it needs")
            seen.add(action)


def _check_last_stage(schedule: Schedule) -> None:
    """Torch's runtime appends the losses as they come and reads them by micro-batch."""
    last = schedule.stages - 1
    rank = schedule.placement[last]
    forwards = [action for action in schedule.order[rank] if action.stage == last and action.op is Op.F]
    for place, action in enumerate(forwards):
        if action.micro_batch != place:
            _fail(schedule, rank, action, f"comes where {last}F{place} is due: the last stage keeps micro-batch order")
