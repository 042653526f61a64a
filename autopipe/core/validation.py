"""Whether an action table can run: complete, in order, on its ranks, by the runtime's rules, without deadlock.

Torch's runtime adds the transfers to a table: each one behind the action that makes the value, on both ranks at the
same moment of one common sequence. So whenever such a sequence exists, every rank meets its transfers in the order
of that sequence, and none waits for ever, even when both sides of each transfer block until the other is there.
``sequence`` finds one, or says which actions wait for each other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, NoReturn

from autopipe.core.errors import ScheduleError
from autopipe.core.schedule import WEIGHTS, Action, Op, Schedule
from autopipe.core.versions import uses

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
    _check_kind(schedule)
    _check_actions(schedule, can_split_backward)
    _check_complete(schedule, forward_only)
    _check_stage_order(schedule)
    if schedule.executor == "torch":
        _check_last_stage(schedule)
    if schedule.asynchronous and not forward_only:
        _check_updates(schedule)
        uses(schedule)
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
    count = schedule.micro_batches
    first = [schedule.is_first(stage) for stage in range(schedule.stages)]
    last = [schedule.is_last(stage) for stage in range(schedule.stages)]

    def of(action: Action) -> Values:
        stage, op, batch = action
        if op is Op.F:
            return Values(2 * stage * count + batch, -1 if first[stage] else 2 * (stage - 1) * count + batch)
        if op in (Op.B, Op.I):
            made = (2 * stage + 1) * count + batch
            return Values(made, -1 if last[stage] else made + 2 * count)
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


def _check_kind(schedule: Schedule) -> None:
    """The parts are those of whole replicas, the policy is known, and its executor can follow it."""
    length = schedule.stages // max(schedule.ways, 1)
    if schedule.part_of != tuple(range(length)) * schedule.ways:
        raise ScheduleError(f"{schedule.name}: parts {schedule.parts} are not 0, 1, … for each replica of the model")
    if schedule.weights not in WEIGHTS:
        raise ScheduleError(f"{schedule.name}: weights {schedule.weights!r}: use one of {', '.join(WEIGHTS)}")
    if schedule.executor == "torch" and (schedule.ways > 1 or schedule.asynchronous):
        what = "two replicas on the same ranks" if schedule.ways > 1 else "updates without a flush"
        raise ScheduleError(f"{schedule.name}: torch's runtime has no {what}: the executor must be own")
    if schedule.asynchronous and schedule.stages != schedule.ranks:
        raise ScheduleError(f"{schedule.name}: updates without a flush need one stage a rank, not {schedule.stages}")


def _check_actions(schedule: Schedule, can_split: Sequence[bool] | None) -> None:
    stages = schedule.stages
    for rank, row in enumerate(schedule.order):
        for action in row:
            if not 0 <= action.stage < stages:
                _fail(schedule, rank, action, f"names a stage that does not exist: there are {stages}")
            where = schedule.placement[action.stage]
            if where != rank:
                _fail(schedule, rank, action, f"belongs to rank {where}, which holds stage {action.stage}")
            if action.op is Op.O and not schedule.asynchronous:
                _fail(schedule, rank, action, "is an optimizer step, which comes after the table and is not in it")
            if action.op in (Op.I, Op.W) and can_split is not None and not can_split[action.stage]:
                _fail(schedule, rank, action, f"splits the backward of stage {action.stage}, which must stay whole (B)")


def _check_complete(schedule: Schedule, forward_only: bool) -> None:
    """Every micro-batch goes through one replica, and there each stage runs F, and B or I and W unless
    ``forward_only``, once."""
    counts = Counter(action for row in schedule.order for action in row)
    runs: defaultdict[tuple[int, int], set[Op]] = defaultdict(set)
    for action, count in counts.items():
        if count > 1:
            _fail(schedule, schedule.placement[action.stage], action, f"is there {count} times, once is right")
        if action.op is not Op.O:
            runs[action.stage, action.micro_batch].add(action.op)
    length = schedule.stages // schedule.ways
    needed = ({Op.F},) if forward_only else ({Op.F, Op.B}, {Op.F, Op.I, Op.W})
    for batch in range(schedule.micro_batches):
        first = _way(schedule, batch, counts)
        for stage in range(schedule.stages):
            has = runs.get((stage, batch), set())
            if first <= stage < first + length:
                if has not in needed:
                    found = " ".join(op.value for op in Op if op in has) or "nothing"
                    needs = "F and nothing else" if forward_only else "F and B, or F, I and W"
                    what = f"stage {stage}, micro-batch {batch}"
                    _fail(schedule, schedule.placement[stage], what, f"has {found}: it needs {needs}")
            elif has:
                what = f"stage {stage}, micro-batch {batch}"
                _fail(schedule, schedule.placement[stage], what, f"runs, but it goes through the replica of {first}")


def _way(schedule: Schedule, batch: int, there: Container[Action]) -> int:
    """The first stage of the replica that a micro-batch goes through."""
    length = schedule.stages // schedule.ways
    firsts = range(0, schedule.stages, length)
    return next((first for first in firsts if Action(first, Op.F, batch) in there), 0)


def _check_updates(schedule: Schedule) -> None:
    """Each stage steps after the last gradient of each update, in order, and as often as the others."""
    size, rest = divmod(schedule.micro_batches, schedule.updates)
    if rest:
        raise ScheduleError(
            f"{schedule.name}: {schedule.micro_batches} micro-batches are not divisible by {schedule.updates} updates"
        )
    for rank, row in enumerate(schedule.order):
        gradients = steps = 0
        for action in row:
            if action.op is Op.O:
                if action.micro_batch != steps or gradients != (steps + 1) * size:
                    what = f"is there after {gradients} gradients and {steps} steps: it belongs after"
                    number = action.micro_batch
                    _fail(schedule, rank, action, f"{what} {(number + 1) * size} gradients and {number} steps")
                steps += 1
            elif action.op in (Op.B, Op.W):
                if action.micro_batch // size != steps:
                    _fail(schedule, rank, action, f"is not of update {steps}, whose gradients are due")
                gradients += 1
        if steps != schedule.updates:
            _fail(schedule, rank, "the row", f"has {steps} optimizer steps, others have {schedule.updates}")


def _check_stage_order(schedule: Schedule) -> None:
    """F comes before B and I, and I before W, of the same stage and micro-batch."""
    before = {Op.B: Op.F, Op.I: Op.F, Op.W: Op.I}
    for rank, row in enumerate(schedule.order):
        seen: set[tuple[int, Op, int]] = set()
        for action in row:
            first = before.get(action.op)
            if first is not None and (action.stage, first, action.micro_batch) not in seen:
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
