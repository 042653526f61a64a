"""For how many micro-batches a stage keeps what crosses its two boundaries, by the order alone.

A receive has its buffer from when it is asked for (lowering.asked) until the stage's backward is done with it. What was
sent is kept until it is known to have been taken: until something comes from its receiver that this made afterwards.
The outputs of a forward are kept for its backward anyway.

Stage 1 of 2 with 1F1B and three micro-batches; a gradient is known to be taken when a forward comes that follows it:

    row              1F0   1B0   1F1   1B1   1F2   1B2
    received           1     2     1     2     1     1
    gradients sent     0     1     1     2     1     2
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from autopipe.core.lowering import asked
from autopipe.core.schedule import Action, Op, Schedule


class Kept(NamedTuple):
    """The most micro-batches of which a stage keeps tensors at once.

    ``before`` counts activations that it received and gradients that it sent, ``behind`` activations that it sent and
    gradients that it received. Between two stages on one rank nothing is sent, and both are the earlier stage's.
    """

    before: int
    behind: int


class _Side(IntEnum):
    BEFORE = 0
    BEHIND = 1


def in_turn(ahead: Sequence[int], micro_batches: int) -> tuple[Kept, ...]:
    """``kept`` of a schedule with one stage on a rank that runs F and B in turn; see core.schedule.Kind."""
    last = len(ahead) - 1
    return tuple(_in_turn(first, micro_batches, stage > 0, stage < last) for stage, first in enumerate(ahead))


@cache
def _in_turn(first: int, micro_batches: int, receives: bool, sends: bool) -> Kept:
    return Kept(min(first + 3, micro_batches + 1) if receives else 0, first + 1 if sends else 0)


def kept(schedule: Schedule) -> tuple[Kept, ...]:
    """What each stage of a table keeps."""
    most = [[0, 0] for _ in schedule.placement]
    places = [{action: place for place, action in enumerate(row)} for row in schedule.order]
    for rank, asks in enumerate(asked(schedule)):
        _Row(schedule, rank, places, most).run(asks)
    return tuple(Kept(*counts) for counts in most)


class _Row:
    """One rank's row, action by action; notes the ``most`` that its stages keep on either side."""

    def __init__(
        self, schedule: Schedule, rank: int, places: Sequence[dict[Action, int]], most: list[list[int]]
    ) -> None:
        self.schedule, self.rank, self.places, self.most = schedule, rank, places, most
        self.now = {stage: [0, 0] for stage, where in enumerate(schedule.placement) if where == rank}
        self.sent: dict[int, list[tuple[int, int]]] = {}  # by receiver: the place where it takes it, whose gradient

    def run(self, asks: Sequence[Sequence[Action]]) -> None:
        """All of the row; ``asks`` are the readers whose values are asked for before each action."""
        for action, readers in zip(self.schedule.order[self.rank], asks, strict=True):
            for reader in readers:
                self._count(reader.stage, _Side.BEFORE if reader.op is Op.F else _Side.BEHIND, 1)
            if action.op is Op.F:
                self._forward(action)
            elif action.op in (Op.B, Op.I):
                self._backward(action)
            elif action.op is Op.W:
                self._done(action.stage)

    def _forward(self, action: Action) -> None:
        stage, batch = action.stage, action.micro_batch
        if not self.schedule.is_first(stage):
            self._heard(Action(stage - 1, Op.F, batch))
        if not self.schedule.is_last(stage):
            self._count(stage, _Side.BEHIND, 1)
        if not self.schedule.trains:
            self._let_go_received(stage)

    def _backward(self, action: Action) -> None:
        stage, _, batch = action
        if not self.schedule.is_last(stage):
            self._heard(Action(stage + 1, Op.B, batch))
        if not self.schedule.is_first(stage):
            self._return(stage, batch)
        if not self.schedule.is_last(stage):
            self.now[stage][_Side.BEHIND] -= 1
        if action.op is Op.B:
            self._done(stage)

    def _return(self, stage: int, batch: int) -> None:
        """A gradient goes back, to another rank or to the stage before on this one."""
        where = self.schedule.placement[stage - 1]
        if where == self.rank:
            self._count(stage - 1, _Side.BEHIND, 1)
            return
        self._count(stage, _Side.BEFORE, 1)
        self.sent.setdefault(where, []).append((self._place(where, Action(stage - 1, Op.B, batch)), stage))

    def _done(self, stage: int) -> None:
        """A micro-batch's backward is over: what it received is not needed any more."""
        self._let_go_received(stage)
        if not self.schedule.is_last(stage):
            self.now[stage][_Side.BEHIND] -= 1

    def _let_go_received(self, stage: int) -> None:
        if not self.schedule.is_first(stage) and self.schedule.placement[stage - 1] != self.rank:
            self.now[stage][_Side.BEFORE] -= 1

    def _heard(self, made: Action) -> None:
        """Something came that its sender made; what that had taken before is not kept any more."""
        where = self.schedule.placement[made.stage]
        if where == self.rank:
            return
        place, waiting = self._place(where, made), self.sent.get(where, [])
        for taken_at, stage in waiting:
            if taken_at < place:
                self.now[stage][_Side.BEFORE] -= 1
        self.sent[where] = [each for each in waiting if each[0] >= place]

    def _place(self, rank: int, action: Action) -> int:
        """The place of an action in its row; B stands for I too."""
        place = self.places[rank].get(action)
        return self.places[rank][action._replace(op=Op.I)] if place is None else place

    def _count(self, stage: int, side: _Side, more: int) -> None:
        self.now[stage][side] += more
        self.most[stage][side] = max(self.most[stage][side], self.now[stage][side])
