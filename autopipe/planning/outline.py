"""What a schedule's order means for its stages: how often each operation runs, and what is in flight meanwhile.

For schedules that run F and B in turn it follows from how many forwards come first, so that the order, which may have
a hundred thousand actions, is only made for those that are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopipe.core.schedule import Action, Op, Schedule, stages_on
from autopipe.loads import Load, peak_loads
from autopipe.planning.recompute import Moment
from autopipe.simulate import OPS


class Row(NamedTuple):
    """What the bound needs to know of one stage's actions.

    ``counts`` is how often F, B, I and W run; ``splits`` whether any I does. ``trailing`` weight gradients come after
    the last gradient. ``rounds`` of F and its B or I follow one another without overlap. ``later`` is how often the
    operations run after the first B or I, whose F came first; ``earlier`` how often before the last F.
    """

    counts: tuple[int, ...]
    splits: bool
    trailing: int
    rounds: int
    later: tuple[int, ...]
    earlier: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """A schedule without its order: ``rows`` of each stage and the ``moments`` at which it can hold most.

    ``ahead`` is there where it runs F and B in turn; see core.schedule.Kind.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    rows: tuple[Row, ...]
    moments: tuple[tuple[Moment, ...], ...]
    ahead: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @classmethod
    def of(cls, schedule: Schedule) -> Outline:
        """The outline of an order."""
        return cls(
            schedule.name,
            schedule.ranks,
            schedule.micro_batches,
            schedule.placement,
            tuple(_rows(schedule)),
            tuple(_moments(schedule)),
        )

    @classmethod
    def in_turn(cls, name: str, micro_batches: int, ahead: Sequence[int]) -> Outline:
        """The outline of a schedule with one stage on a rank that runs F and B in turn; see core.schedule.Kind."""
        m = micro_batches
        rows = [
            Row((m, m, 0, 0), False, 0, -(-m // first), (m - first, m - 1, 0, 0), (m - 1, m - first, 0, 0))
            for first in ahead
        ]
        moments = tuple(
            (Moment(m, 0, False, True), Moment(m - 1, 0, True, False))
            if first == m
            else (Moment(first, 0, True, False),)
            for first in ahead
        )
        return cls(name, len(ahead), m, tuple(range(len(ahead))), tuple(rows), moments, tuple(ahead))


def _rows(schedule: Schedule) -> list[Row]:
    actions: list[list[Action]] = [[] for _ in schedule.placement]
    for row in schedule.order:
        for action in row:
            actions[action.stage].append(action)
    return [_row(stage) for stage in actions]


def _row(actions: list[Action]) -> Row:
    ops = [action.op for action in actions]
    last = max(place for place, op in enumerate(ops) if op in (Op.B, Op.I))
    waiting, rounds = None, 0
    for _, op, micro_batch in actions:
        if op is Op.F and waiting is None:
            waiting = micro_batch
        elif op in (Op.B, Op.I) and micro_batch == waiting:
            waiting, rounds = None, rounds + 1
    first = next(place for place, op in enumerate(ops) if op in (Op.B, Op.I))
    newest = max(place for place, op in enumerate(ops) if op is Op.F)
    return Row(
        tuple(map(ops.count, OPS)),
        Op.I in ops,
        ops[last:].count(Op.W),
        rounds,
        tuple(map(ops[first + 1 :].count, OPS)),
        tuple(map(ops[:newest].count, OPS)),
    )


def _moments(schedule: Schedule) -> list[tuple[Moment, ...]]:
    found: dict[int, tuple[Moment, ...]] = {}
    for rank in range(schedule.ranks):
        highest = peak_loads(schedule, rank)
        own = stages_on(schedule.placement, rank)
        for place, stage in enumerate(own):
            found[stage] = tuple(dict.fromkeys(_moment(load, place) for load in highest))
    return [found[stage] for stage in range(schedule.stages)]


def _moment(load: Load, place: int) -> Moment:
    first = load.first and load.running == place
    return Moment(load.forwards[place], load.input_grads[place], load.gradients[place], first)
