"""When the receives of a table are posted.

Torch's lowering walks the rows in rounds, one action a rank, and puts a receive into the receiver's row at the moment
at which the sender runs, hence before whatever the receiver runs next. A receive that comes right before the action
that needs it asks for the value only when it would use it: if the value was sent before, its sender has to be
interrupted to hand it over (Link.late_s). Our own runtime (runtime/own) asks for some messages of each kind ahead.
"""

from __future__ import annotations

from autopipe.core.schedule import Action, Op, Schedule

AHEAD = 2
"""So many messages of a kind are asked for by our own runtime before they are needed."""


def posted_last(schedule: Schedule) -> frozenset[Action]:
    """The actions whose receive is posted right before them. The schedule must be valid."""
    return frozenset(
        action
        for row, asks in zip(schedule.order, _asked_by_torch(schedule), strict=True)
        for action, readers in zip(row, asks, strict=True)
        if _whole(action) in readers
    )


def asked(schedule: Schedule) -> list[list[list[Action]]]:
    """For each action of each row, the actions whose values are asked for after the action before it.

    B stands for I too. The schedule must be valid.
    """
    return _asked_by_torch(schedule) if schedule.executor == "torch" else _asked_by_own(schedule)


def _asked_by_torch(schedule: Schedule) -> list[list[list[Action]]]:
    """When the sender runs, before whatever its receiver runs next."""
    places = [0] * schedule.ranks
    there: set[Action] = set()
    asks: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.order]
    while any(place < len(row) for place, row in zip(places, schedule.order, strict=True)):
        for rank, row in enumerate(schedule.order):
            if places[rank] == len(row) or not _ready(row[places[rank]], there, schedule.stages):
                continue
            action = row[places[rank]]
            there.add(action)
            places[rank] += 1
            reader = _reader(action, schedule)
            if reader is not None and schedule.placement[reader.stage] != rank:
                waiting = schedule.placement[reader.stage]
                asks[waiting][places[waiting]].append(reader)
    return asks


def _asked_by_own(schedule: Schedule) -> list[list[list[Action]]]:
    """The first ``AHEAD`` messages of each kind at the start, then as many before each one that is taken."""
    rows = [{_whole(action): place for place, action in enumerate(row)} for row in schedule.order]
    asks: list[list[list[Action]]] = [[[] for _ in row] for row in schedule.order]
    coming: dict[tuple[int, Op], list[Action]] = {}
    for rank, row in enumerate(schedule.order):
        for action in row:
            reader = _reader(action, schedule)
            if reader is not None and schedule.placement[reader.stage] != rank:
                coming.setdefault((reader.stage, reader.op), []).append(reader)
    for (stage, _), readers in coming.items():
        rank = schedule.placement[stage]
        for number, reader in enumerate(readers):
            place = rows[rank][readers[number - AHEAD]] if number >= AHEAD else 0
            asks[rank][place].append(reader)
    return asks


def _ready(action: Action, there: set[Action], stages: int) -> bool:
    stage, op, batch = action
    if op is Op.F:
        return stage == 0 or Action(stage - 1, Op.F, batch) in there
    if op in (Op.B, Op.I) and stage < stages - 1:
        return Action(stage + 1, Op.B, batch) in there or Action(stage + 1, Op.I, batch) in there
    return True


def _reader(action: Action, schedule: Schedule) -> Action | None:
    """The action of another stage that needs what this one makes; B stands for I too."""
    stage, op, batch = action
    if op is Op.F:
        return None if schedule.is_last(stage) else Action(stage + 1, Op.F, batch)
    return None if schedule.is_first(stage) or op in (Op.W, Op.O) else Action(stage - 1, Op.B, batch)


def _whole(action: Action) -> Action:
    """The action, with B for I."""
    return action._replace(op=Op.B) if action.op is Op.I else action
