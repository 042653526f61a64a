"""What a schedule's order means for its stages: how often each operation runs, and what is in flight meanwhile.

For schedules that run F and B in turn it follows from how many forwards come first, so that the order, which may have
a hundred thousand actions, is only made for those that are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from autopipe.core.in_flight import Kept, in_turn, kept
from autopipe.core.schedule import Action, Op, Schedule, stages_on
from autopipe.core.stage import StageCost
from autopipe.core.versions import copies
from autopipe.graph import OPS
from autopipe.loads import Load, peak_loads
from autopipe.planning.needs import Moment


class Row(NamedTuple):
    """What the bound needs to know of one stage's actions.

    ``counts`` is how often F, B, I and W run in a step, or for an update where none flushes; the rest is of the whole
    table. ``splits``: whether any I runs. ``trailing`` weight gradients come after the last gradient. ``rounds`` of F
    and its B or I follow one another without overlap. ``later`` is how often the operations run after the first B or I,
    whose F came first; ``earlier`` how often before the last F.
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

    ``micro_batches`` are those of a step or an update. ``part_of`` is the part of the model that each stage holds,
    ``kept`` of how many micro-batches it keeps messages, ``copies`` how many versions of its weights it has. An
    asynchronous table holds several ``updates``, and repeats itself. ``ahead`` is there where the schedule runs F and
    B in turn; see core.schedule.Kind.
    """

    name: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    rows: tuple[Row, ...]
    moments: tuple[tuple[Moment, ...], ...]
    part_of: tuple[int, ...]
    kept: tuple[Kept, ...]
    copies: tuple[int, ...]
    updates: int = 1
    ahead: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """How many stages there are, those of both replicas of a two-way pipeline counted."""
        return len(self.placement)

    @property
    def ways(self) -> int:
        """How many replicas of the model run over the same ranks: two in a two-way pipeline."""
        return self.part_of.count(0)

    @property
    def parts(self) -> int:
        """How many stages the model is cut into."""
        return self.stages // self.ways

    @property
    def asynchronous(self) -> bool:
        """Whether updates come without a flush: then a step is the period from one to the next."""
        return self.updates > 1

    def always_bytes(self, stage: int, cost: StageCost) -> int:
        """What a stage of that cost holds throughout; see loads.always_bytes."""
        return cost.always_bytes(self.kept[stage], self.copies[stage])

    @classmethod
    def of(cls, schedule: Schedule) -> Outline:
        """The outline of an order."""
        return cls(
            schedule.name,
            schedule.ranks,
            schedule.per_update,
            schedule.placement,
            tuple(_rows(schedule)),
            tuple(_moments(schedule)),
            schedule.part_of,
            kept(schedule),
            tuple(copies(schedule, stage) if schedule.asynchronous else 1 for stage in range(schedule.stages)),
            schedule.updates,
        )

    @classmethod
    def in_turn(cls, name: str, micro_batches: int, ahead: Sequence[int]) -> Outline:
        """The outline of a schedule with one stage on a rank that runs F and B in turn; see core.schedule.Kind."""
        rows, moments = zip(*(_turn(first, micro_batches) for first in ahead), strict=True)
        stages, single = tuple(range(len(ahead))), (1,) * len(ahead)
        crossing = in_turn(ahead, micro_batches)
        return cls(name, len(ahead), micro_batches, stages, rows, moments, stages, crossing, single, ahead=tuple(ahead))


@cache
def _turn(first: int, micro_batches: int) -> tuple[Row, tuple[Moment, ...]]:
    """The row and the moments of a stage that runs so many F first, and then B and F in turn."""
    m = micro_batches
    row = Row((m, m, 0, 0), False, 0, -(-m // first), (m - first, m - 1, 0, 0), (m - 1, m - first, 0, 0))
    if first < m:
        return row, (Moment(first, 0, True, False),)
    return row, (Moment(m, 0, False, True), Moment(m - 1, 0, True, False))


def _rows(schedule: Schedule) -> list[Row]:
    actions: list[list[Action]] = [[] for _ in schedule.placement]
    for row in schedule.order:
        for action in row:
            actions[action.stage].append(action)
    return [_row(stage, schedule.updates) for stage in actions]


def _row(actions: list[Action], updates: int) -> Row:
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
        tuple(ops.count(op) // updates for op in OPS),
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
