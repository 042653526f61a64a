"""Which receives of a table torch's lowering posts only when their value is needed.

The lowering walks the rows in rounds, one action a rank, and puts a receive into the receiver's row at the moment at
which the sender runs, hence before whatever the receiver runs next. A receive that comes right before the action that
needs it asks for the value only when it would use it: if the value was sent before, its sender has to be interrupted
to hand it over (Link.late_s).
"""

from __future__ import annotations

from autopipe.core.schedule import Action, Op, Schedule


def posted_last(schedule: Schedule) -> frozenset[Action]:
    """The actions whose receive is posted right before them. The schedule must be valid."""
    places = [0] * schedule.ranks
    there: set[Action] = set()
    last = set()
    while any(place < len(row) for place, row in zip(places, schedule.order, strict=True)):
        for rank, row in enumerate(schedule.order):
            if places[rank] == len(row) or not _ready(row[places[rank]], there, schedule.stages):
                continue
            action = row[places[rank]]
            there.add(action)
            places[rank] += 1
            reader = _reader(action, schedule.stages)
            if reader is not None and schedule.placement[reader.stage] != rank:
                waiting = schedule.placement[reader.stage]
                following = schedule.order[waiting][places[waiting]]
                if _same(following, reader):
                    last.add(following)
    return frozenset(last)


def _ready(action: Action, there: set[Action], stages: int) -> bool:
    stage, op, batch = action
    if op is Op.F:
        return stage == 0 or Action(stage - 1, Op.F, batch) in there
    if op in (Op.B, Op.I) and stage < stages - 1:
        return Action(stage + 1, Op.B, batch) in there or Action(stage + 1, Op.I, batch) in there
    return True


def _reader(action: Action, stages: int) -> Action | None:
    """The action of another stage that needs what this one makes; B stands for I too."""
    stage, op, batch = action
    if op is Op.F:
        return Action(stage + 1, Op.F, batch) if stage < stages - 1 else None
    return Action(stage - 1, Op.B, batch) if op in (Op.B, Op.I) and stage else None


def _same(action: Action, reader: Action) -> bool:
    return action == reader or action == reader._replace(op=Op.I if reader.op is Op.B else reader.op)


AHEAD = 2
"""So many messages of a kind are asked for by our own runtime before they are needed."""


def buffered(schedule: Schedule, stage: int) -> int:
    """For how many micro-batches a stage keeps what it receives and sends.

    Torch's runtime makes the receive buffers of every micro-batch before the first one, and keeps every tensor that it
    sends until the step's end. Our own has what is in flight, and what it asks for ahead.
    """
    if schedule.executor == "torch":
        return schedule.micro_batches
    held = most = count = 0
    for where, op, _ in schedule.order[schedule.placement[stage]]:
        if where == stage:
            held += (op is Op.F) - (op in (Op.B, Op.I))
            count += op is Op.F
            most = max(most, held)
    return min(most + AHEAD, count)
