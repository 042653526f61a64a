"""A case: one depth, micro-batch size, schedule and rule for recomputation; all that is open is where to cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from typing import NamedTuple

import numpy as np

from autopipe.core.cluster import Link
from autopipe.core.schedule import Schedule
from autopipe.graph import Graph
from autopipe.loads import Load, peak_loads
from autopipe.planning.bounds import has_room, least_ends, least_periods, quick_bound_s, quick_period_s
from autopipe.planning.ladder import Floats
from autopipe.planning.moves import joint_moves, single_moves
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.recompute import chosen_layers, fit
from autopipe.planning.rough import Rough
from autopipe.planning.seats import Seats
from autopipe.planning.setting import Setting
from autopipe.planning.shares import shared_bound_s
from autopipe.planning.splits import Positions, Splits
from autopipe.planning.tables import Tables, places, tables
from autopipe.solvers.brute import splits as every_split
from autopipe.solvers.chain_dp import smallest_maximum

_FEW = 2000
"""Up to so many splits are all simulated."""

_HORIZON = 2.0
"""Where there are more, stages are looked at that a step of so many times the quick bound has room for."""

_WALKED = 2_000_000
"""Actions that one round of moving cuts may simulate; of more moves the most promising ones."""

_LARGE = 4000
"""Cuts of plans with more actions are moved only until within ``_ENOUGH`` of the bound."""

_ENOUGH = 1e-3

_STARTS = 3
"""So many splits of the solvers, the best ones, are moved."""

_SAME = 1e-9

_HEAVY = ("tables", "splits", "rough", "least_ends")
"""What a case has of every range on every stage."""


class Found(NamedTuple):
    """A split of a case: its positions, the seconds of its step, and the highest peak of its ranks."""

    positions: tuple[int, ...]
    step_s: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Case:
    """One depth, number of replicas, micro-batch size, schedule, and rule for recomputation.

    The rule is ``none``, ``all`` or ``auto``. ``make`` gives the schedule when its order is first needed. ``reach`` is
    how many pieces a stage may have in its tables; 0 means any number.
    """

    setting: Setting
    ranges: Ranges
    outline: Outline
    make: Callable[[], Schedule]
    micro_batch: int
    recompute: str
    replicas: int = 1
    reach: int = 0

    def ordered(self, schedule: Schedule) -> Case:
        """The same case with another order."""
        return replace(self, outline=Outline.of(schedule), make=lambda: schedule)

    @classmethod
    def of(cls, setting: Setting, ranges: Ranges, schedule: Schedule, micro_batch: int, recompute: str) -> Case:
        """The case of a schedule, with stages of any length and one replica."""
        return cls(setting, ranges, Outline.of(schedule), lambda: schedule, micro_batch, recompute)

    @property
    def depth(self) -> int:
        """How many ranks one pipeline has."""
        return self.outline.ranks

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        return self.depth * self.replicas

    @property
    def stages(self) -> int:
        """How many stages there are, those of both replicas of a two-way pipeline counted."""
        return self.outline.stages

    @property
    def parts(self) -> int:
        """How many stages the model is cut into."""
        return self.outline.parts

    @property
    def seats(self) -> Seats:
        """The devices that its ranks are."""
        return self.setting.seats(self.depth, self.replicas)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of its actions."""
        return self.make()

    @cached_property
    def graph(self) -> Graph:
        """The order, ready to be walked."""
        if self.outline.ahead:
            return Graph.in_turn(self.outline.ahead, self.outline.micro_batches, lambda: self.schedule)
        return Graph.of(self.schedule)

    @property
    def hops(self) -> tuple[Link | None, ...]:
        """The links between neighbouring stages."""
        return self.seats.hops(self.outline.placement)

    def loads(self, rank: int) -> tuple[Load, ...]:
        """What a rank holds at the moments that can be its highest."""
        if self.stages > self.depth:
            return self._loads[rank]
        stage = self.outline.placement.index(rank)
        return tuple(Load(0, (f,), (i,), (gradients,), first) for f, i, gradients, first in self.outline.moments[stage])

    @cached_property
    def _loads(self) -> list[tuple[Load, ...]]:
        return [peak_loads(self.schedule, rank) for rank in range(self.depth)]

    @cached_property
    def tables(self) -> Tables:
        """What ranges cost on every stage."""
        return tables(
            self.setting,
            self.ranges,
            self.outline,
            self.seats,
            reach=self.reach or self.ranges.pieces,
            may_recompute=self.recompute == "auto",
        )

    @cached_property
    def splits(self) -> Splits:
        """The tables, looked up for many splits."""
        loads = [self.loads(rank) for rank in range(self.depth)] if self.stages > self.depth else []
        shared = self.recompute == "auto"
        return Splits(self.ranges, self.outline, self.tables, self.hops, loads, shared, self.setting, self.seats)

    @cached_property
    def rough(self) -> Rough:
        """The tables as the solvers see them."""
        return Rough(self.outline, self.tables)

    @cached_property
    def least_ends(self) -> Floats:
        """The earliest end of a step, or the least period, by the range of each stage; see bounds."""
        if self.outline.asynchronous:
            return least_periods(self.tables, self.outline)
        return least_ends(self.tables, self.outline.rows)

    @cached_property
    def quick_bound_s(self) -> float:
        """A bound that needs no tables."""
        given = (self.ranges, self.seats, self.outline.micro_batches)
        if self.outline.asynchronous:
            return quick_period_s(*given)
        number, splits = self.stages // self.depth, any(row.splits for row in self.outline.rows)
        return quick_bound_s(*given, stages_per_rank=number, splits=splits, ways=self.outline.ways)

    @property
    def horizon_s(self) -> float:
        """A step that is shorter than this has no stage beyond the reach."""
        return horizon_s(self.ranges, self.parts, self.reach, self.quick_bound_s)

    @property
    def _partial(self) -> bool:
        """Whether the tables lack ranges that stages can have."""
        return 0 < self.reach < _longest(self.ranges, self.parts)

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no split, and no choice of layers to recompute, can beat; infinite where none fits."""
        if not self._has_room:
            return float("inf")
        if self.outline.ways > 1:
            return self.quick_bound_s
        found = smallest_maximum(self.least_ends)
        least_s = found.value * self.ranges.tick_s if found else float("inf")
        return max(self.quick_bound_s, self._shared_bound_s, min(least_s, self.horizon_s))

    @property
    def _shared_bound_s(self) -> float:
        if self.outline.asynchronous or self.stages == self.depth:
            return 0.0
        splits = any(row.splits for row in self.outline.rows)
        given = self.ranges, self.seats, self.outline.placement, self.outline.micro_batches
        return shared_bound_s(*given, splits=splits, may_recompute=self.recompute == "auto")

    @property
    def _has_room(self) -> bool:
        if self.stages > self.depth:
            return True
        again = self.recompute == "auto"
        return has_room(self.ranges, places(self.outline, self.seats, shared=again), may_recompute=again)

    def narrowed(self) -> Case:
        """The case with tables of no more ranges than a good split can need, where the splits are many."""
        waits = self.outline.ways == 1 and not self.outline.asynchronous
        given = self.ranges, self.seats, self.parts, self.outline.micro_batches
        return replace(self, reach=reach_of(*given, self.quick_bound_s, waits=waits))

    @cached_property
    def tight(self) -> bool:
        """Whether memory keeps it from a split, or makes a range of layers recompute."""
        return not self._has_room or self.tables.tight

    def let_go(self) -> None:
        """Drop the tables. What was found with them stays; they are made again where more is asked."""
        made = vars(self)
        if "tables" in made:
            made["tight"] = self.tight
            for name in _HEAVY:
                made.pop(name, None)

    @property
    def actions(self) -> int:
        """How many actions its order has where no backward is split."""
        return 2 * self.parts * self.outline.micro_batches * self.outline.updates

    @property
    def large(self) -> bool:
        """Whether it has so many actions that it is looked at less closely."""
        return self.actions > _LARGE

    @cached_property
    def near(self) -> Found | None:
        """The best of the solvers' splits and the baselines, None when none of them fits."""
        if not self._has_room:
            return None
        found = min(self._starts, key=_key, default=None)
        return replace(self, reach=0).near if found is None and self._partial else found

    @cached_property
    def _starts(self) -> list[Found]:
        return sorted(self.measured(dict.fromkeys([*self._solved, *self.baselines()])), key=_key)

    @cached_property
    def best(self) -> Found | None:
        """The best split that fits, None when none does: of all splits where they are few, else by moving cuts."""
        if comb(self.ranges.pieces - 1, self.parts - 1) <= _FEW:
            return self._quickest(self._allowed(every_split(self.ranges.pieces, self.parts)))
        found = self.refined()
        if self._partial and (found is None or found.step_s > self.horizon_s):
            return replace(self, reach=0).refined()
        return found

    def refined(self) -> Found | None:
        """The best that moving cuts reaches from the solvers' splits, or a baseline where that is better."""
        starts = self._starts[: 1 if self.large else _STARTS]
        return min(map(self._moved, starts), key=_key, default=None)

    def _moved(self, found: Found) -> Found:
        """A split's cuts moved while the step gets shorter: one by one, and where that does not help, together."""
        better: Found | None = found
        while better is not None:
            found = better
            if found.step_s <= self.lower_bound_s * (1 + (_ENOUGH if self.large else _SAME)):
                return found
            moved = (move(found.positions) for move in (single_moves, joint_moves))
            steps = (self._quickest(self._promising(table, found.step_s)) for table in moved)
            better = next((step for step in steps if step is not None and step.step_s < found.step_s), None)
        return found

    def measured(self, positions: Iterable[tuple[int, ...]]) -> list[Found]:
        """The splits that are allowed and fit, simulated all at once."""
        return _listed(*self._simulated(self._allowed(positions)))

    def _allowed(self, positions: Iterable[tuple[int, ...]]) -> Positions:
        return self.splits.allowed(np.array([*positions], dtype=np.intp).reshape(-1, self.parts + 1))

    def _quickest(self, table: Positions) -> Found | None:
        """The best of allowed splits that fits, None where none does."""
        table, steps, peaks = self._simulated(table)
        least = steps == steps.min(initial=np.inf)
        return min(_listed(table[least], steps[least], peaks[least]), key=_key, default=None)

    def _simulated(self, table: Positions) -> tuple[Positions, Floats, Floats]:
        """Those of allowed splits that fit, their steps and their highest peaks."""
        peaks = self.splits.peaks(table)
        fit = (peaks <= np.array(self.seats.limits)).all(axis=1)
        table, peaks = table[fit], peaks[fit].max(axis=1, initial=0)
        if not len(table):
            return table, np.empty(0), peaks
        return table, self.graph.steps(self.splits.costs(table)) * self.ranges.tick_s, peaks

    def _promising(self, table: Positions, step_s: float) -> Positions:
        """The splits that may be quicker: all where they are few, else those with the least Σ + (m − 1) · max."""
        table = self.splits.allowed(table)
        if self.outline.ways == 1:
            ends = self.least_ends[self.splits.entries(table)].max(axis=1, initial=0)
            table = table[ends * self.ranges.tick_s < step_s]
        most = max(_WALKED // self.actions, 8)
        if len(table) <= most:
            return table
        return table[np.sort(np.argsort(self.rough.steps(table), kind="stable")[:most])]

    def fits(self) -> bool:
        """Whether any split fits; with several stages on a rank, whether any is found."""
        if self.stages > self.depth:
            return self.best is not None
        return self._has_room and any(
            smallest_maximum(np.where(case.tables.allowed, 1.0, np.inf)) is not None
            for case in ((self, replace(self, reach=0)) if self._partial else (self,))
        )

    @property
    def _solved(self) -> list[tuple[int, ...]]:
        return self.rough.solved(self.least_ends if self.outline.ways == 1 else None)

    def recomputed(self, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each stage of a split the layers that recompute; never the last, whose output and loss run once."""
        ends, last = self.ranges.ends, self.ranges.ends[-1] - 1
        bounds = [(ends[positions[part]], ends[positions[part + 1]]) for part in self.outline.part_of]
        if self.recompute != "auto":
            return tuple(tuple(range(a, min(b, last))) if self.recompute == "all" else () for a, b in bounds)
        begin, end = (np.array(positions)[np.array(self.outline.part_of) + side, None] for side in (0, 1))
        here = places(self.outline, self.seats, shared=True)
        found = fit(self.ranges, begin, end, here, may_recompute=True)
        if not found.fits.all():
            found = fit(self.ranges, begin, end, here, may_recompute=True, smallest=True)
        taken = found.taken[:, 0].tolist()
        return tuple(chosen_layers(self.ranges, count, *bound) for count, bound in zip(taken, bounds, strict=True))

    def baselines(self) -> list[tuple[int, ...]]:
        """The splits of simple rules, by positions; they need not fit."""
        return [self.ranges.places(cuts) for cuts in self.setting.rules(self.parts).values() if cuts is not None]


def _listed(table: Positions, steps: Floats, peaks: Floats) -> list[Found]:
    rows = zip(table.tolist(), steps.tolist(), peaks.tolist(), strict=True)
    return [Found(tuple(row), step_s, bytes_) for row, step_s, bytes_ in rows]


def reach_of(
    ranges: Ranges, seats: Seats, parts: int, micro_batches: int, quick_bound_s: float, *, waits: bool = True
) -> int:
    """The most pieces that a stage of a good split can have, where the splits are many.

    A stage runs its work for all micro-batches; and one that ``waits``, of one pipeline that flushes, for what comes
    before it and behind it.
    """
    longest = _longest(ranges, parts)
    if comb(ranges.pieces - 1, parts - 1) <= _FEW:
        return longest
    room = _HORIZON * quick_bound_s * seats.fastest / ranges.tick_s
    least = ranges.least_step(micro_batches) if waits else micro_batches * ranges.least_work
    most = max(int(np.searchsorted(least, room, "right")), 1)
    return min(shared_reach(ranges, most), longest)


def shared_reach(ranges: Ranges, reach: int) -> int:
    """The reach of pipelines of nearly one depth, so that they share tables: a power of two."""
    return min(1 << (reach - 1).bit_length(), ranges.pieces)


def horizon_s(ranges: Ranges, parts: int, reach: int, quick_bound_s: float) -> float:
    """A step that is shorter than this has no stage beyond the reach; infinite where no stage can be."""
    return _HORIZON * quick_bound_s if 0 < reach < _longest(ranges, parts) else float("inf")


def _longest(ranges: Ranges, parts: int) -> int:
    """The most pieces that a stage can have."""
    return ranges.pieces - parts + 1


def _key(found: Found) -> tuple[float, float, tuple[int, ...]]:
    """The shorter step; then less memory; then the last cut earlier, as in chain_dp."""
    return found.step_s, found.bytes, found.positions[::-1]
