"""A case: one depth, micro-batch size, schedule and rule for recomputation; all that is open is where to cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.baselines import BASELINES
from autopipe.core.cluster import Link
from autopipe.core.schedule import Schedule, stages_on
from autopipe.loads import Load, peak_loads
from autopipe.planning.bounds import has_room, least_ends, least_periods, quick_bound_s, quick_period_s
from autopipe.planning.ladder import Floats
from autopipe.planning.moves import joint_moves, single_moves
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.recompute import chosen_layers, fit
from autopipe.planning.seats import Seats
from autopipe.planning.tables import Setting, Tables, open_ranges, places, spots, tables
from autopipe.simulate import Costs, Graph, late_of
from autopipe.solvers.brute import splits
from autopipe.solvers.chain_dp import Split, smallest_maximum, smallest_step
from autopipe.wires import wires_of

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

    @cached_property
    def part_of(self) -> NDArray[np.intp]:
        """For each stage its place in a split."""
        return np.array(self.outline.part_of, np.intp)

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
        return _HORIZON * self.quick_bound_s if self._partial else float("inf")

    @property
    def _longest(self) -> int:
        """The most pieces that a stage can have."""
        return self.ranges.pieces - self.parts + 1

    @property
    def _partial(self) -> bool:
        """Whether the tables lack ranges that stages can have."""
        return 0 < self.reach < self._longest

    @cached_property
    def lower_bound_s(self) -> float:
        """Seconds that no split, and no choice of layers to recompute, can beat; infinite where none fits."""
        if not self._has_room:
            return float("inf")
        if self.outline.ways > 1:
            return self.quick_bound_s
        found = smallest_maximum(self.least_ends)
        least_s = found.value * self.ranges.tick_s if found else float("inf")
        return max(self.quick_bound_s, min(least_s, self.horizon_s))

    @property
    def _has_room(self) -> bool:
        if self.stages > self.depth:
            return True
        return has_room(self.ranges, self.seats, self.outline, may_recompute=self.recompute == "auto")

    def narrowed(self) -> Case:
        """The case with tables of no more ranges than a good split can need, where the splits are many."""
        if comb(self.ranges.pieces - 1, self.parts - 1) <= _FEW:
            return replace(self, reach=self._longest)
        room = _HORIZON * self.quick_bound_s * max(self.seats.speeds) / self.outline.micro_batches / self.ranges.tick_s
        starts, stops = np.nonzero((self.ranges.work <= room) & self.ranges.real)
        reach = 1 << int((stops - starts).max(initial=1) - 1).bit_length()  # pipelines of nearly one depth share it
        return replace(self, reach=min(reach, self._longest))

    @property
    def tight(self) -> bool:
        """Whether memory keeps it from a split, or makes a range of layers recompute."""
        return not self._has_room or self.tables.tight

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
        return min(self._starts, key=_key, default=None)

    @cached_property
    def _starts(self) -> list[Found]:
        return sorted(self.measured(dict.fromkeys([*self._solved(), *self.baselines()])), key=_key)

    @cached_property
    def best(self) -> Found | None:
        """The best split that fits, None when none does: of all splits where they are few, else by moving cuts."""
        if comb(self.ranges.pieces - 1, self.parts - 1) <= _FEW:
            return min(self.measured(splits(self.ranges.pieces, self.parts)), key=_key, default=None)
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
            moves = (self._measured(self._promising(table, found.step_s)) for table in moved)
            steps = (min(measured, key=_key, default=found) for measured in moves)
            better = next((step for step in steps if step.step_s < found.step_s), None)
        return found

    def measured(self, positions: Iterable[tuple[int, ...]]) -> list[Found]:
        """The splits that are allowed and fit, simulated all at once."""
        return self._measured(np.array([*positions], dtype=np.intp).reshape(-1, self.parts + 1))

    def _measured(self, table: NDArray[np.intp]) -> list[Found]:
        table = self._allowed(table)
        peaks = self._peaks(table)
        fit = (peaks <= np.array(self.seats.limits)).all(axis=1)
        table, peaks = table[fit], peaks[fit].max(axis=1, initial=0)
        if not len(table):
            return []
        steps = self.graph.steps(self.costs(table)) * self.ranges.tick_s
        return [
            Found(tuple(row), s, b) for row, s, b in zip(table.tolist(), steps.tolist(), peaks.tolist(), strict=True)
        ]

    def _allowed(self, table: NDArray[np.intp]) -> NDArray[np.intp]:
        """The splits whose stages are within the tables' reach and allowed."""
        table = table[(np.diff(table) <= self.tables.reach).all(axis=1)]
        return table[self.tables.allowed[self._entries(table)].all(axis=1)]

    def _entries(self, table: NDArray[np.intp]) -> tuple[NDArray[np.intp], ...]:
        """Where the stages of splits are in range tables, arrays of shape (splits, stages) or (stages,)."""
        begin, end = table[:, self.part_of], table[:, self.part_of + 1]
        return np.arange(self.stages), end, begin - end + self.tables.reach

    def _promising(self, table: NDArray[np.intp], step_s: float) -> NDArray[np.intp]:
        """The splits that may be quicker: all where they are few, else those with the least Σ + (m − 1) · max."""
        table = self._allowed(table)
        if self.outline.ways == 1:
            ends = self.least_ends[self._entries(table)].max(axis=1, initial=0)
            table = table[ends * self.ranges.tick_s < step_s]
        most = max(_WALKED // self.actions, 8)
        if len(table) <= most:
            return table
        begin, end = table[:, :-1], table[:, 1:]
        work = self._work[np.arange(self.parts), end, begin - end + self.tables.reach]
        hops = self._hops[np.arange(self.parts - 1), end[:, :-1]].sum(axis=1)
        rough = work.sum(axis=1) + hops + self._repeats * work.max(axis=1)
        return table[np.sort(np.argsort(rough, kind="stable")[:most])]

    def _peaks(self, positions: NDArray[np.intp]) -> Floats:
        """The peak of each rank, shape (splits, ranks); where layers recompute at most that."""
        alone = self.tables.peak_bytes[self._entries(positions)]
        if self.stages == self.depth:
            return alone
        peaks = np.zeros((len(positions), self.depth))
        if self.recompute == "auto":
            for s, rank in enumerate(self.outline.placement):
                peaks[:, rank] += alone[:, s]
            return peaks
        begin, end = positions[:, self.part_of], positions[:, self.part_of + 1]
        for rank in range(self.depth):
            own = stages_on(self.outline.placement, rank)
            peaks[:, rank] = self._joint_peak(rank, begin[:, own], end[:, own])
        return peaks

    def _joint_peak(self, rank: int, begin: NDArray[np.intp], end: NDArray[np.intp]) -> Floats:
        """The peak of a rank whose stages take these ranges, shape (splits,); each has one version of its weights."""
        before, behind = np.array([self.outline.kept[s] for s in stages_on(self.outline.placement, rank)]).T
        crossing = before * self.ranges.activations[begin] + behind * self.ranges.activations[end]
        lasting = self.ranges.static[begin, end] - self.ranges.gradient[begin, end]
        always = (lasting + crossing).sum(axis=1)
        held, left = self.ranges.held[begin, end], self.ranges.held_after_input_grad[begin, end]
        gradient, workspace = self.ranges.gradient[begin, end], self.ranges.workspace[begin, end]
        first = np.minimum(self.ranges.first_backward[begin, end] - held, gradient + workspace)
        running = np.maximum(workspace, first)
        moments = [
            held @ np.array(load.forwards)
            + left @ np.array(load.input_grads)
            + gradient @ np.array(load.gradients)
            + (running if load.first else workspace)[:, load.running]
            for load in self.loads(rank)
        ]
        return np.asarray(always + np.max(moments, axis=0))

    def costs(self, positions: NDArray[np.intp]) -> Costs:
        """The ticks of many splits, positions of shape (splits, parts + 1), as the simulator takes them."""
        entries = self._entries(positions)
        cuts = positions[:, self.part_of[:-1] + 1]
        actions = np.stack([ticks[entries].T for ticks in self.tables.actions], axis=1)
        transfers = np.zeros((2, self.stages, len(positions)))
        stage = np.arange(self.stages - 1)
        transfers[0, 1:] = self.tables.activations[stage, cuts].T
        transfers[1, :-1] = self.tables.gradients[stage, cuts].T
        optimizer = self.tables.optimizer[entries].T
        actions, transfers, optimizer = (
            np.ascontiguousarray(c.reshape(-1, len(positions))) for c in (actions, transfers, optimizer)
        )
        late, wires = late_of(self.hops), wires_of(self.hops)
        ticks = wires.in_ticks(self.ranges.tick_s) if wires else None
        return Costs(actions, transfers, optimizer, np.rint(late / self.ranges.tick_s), ticks)

    def least_memory(self) -> Split | None:
        """The split that exceeds its limits least, by its ``value`` in bytes; None when the pins leave none."""
        starts, stops, _ = spots(self.ranges.pieces, self.ranges.pieces)
        where, again = (starts[None], stops[None]), self.recompute == "auto"
        here = places(self.outline, self.seats, shared=again)
        found = fit(self.ranges, *where, here, may_recompute=again, smallest=True)
        limits = np.array([self.seats.limits[rank] for rank in self.outline.placement])[:, None, None]
        allowed = open_ranges(self.setting, self.ranges, self.outline, self.ranges.pieces)
        return smallest_maximum(self._by_part(np.where(allowed, found.peak_bytes - limits, np.inf)))

    def little_memory(self) -> tuple[int, ...] | None:
        """A split with little that is there throughout on any rank; None when the pins leave none."""
        pieces = self.ranges.pieces
        starts, stops, _ = spots(pieces, pieces)
        allowed = open_ranges(self.setting, self.ranges, self.outline, pieces)
        split = smallest_maximum(self._by_part(np.where(allowed, self.ranges.static[starts, stops], np.inf)))
        return split.positions if split else None

    def fits(self) -> bool:
        """Whether any split fits; with several stages on a rank, whether any is found."""
        if self.stages > self.depth:
            return self.best is not None
        return any(
            smallest_maximum(np.where(case.tables.allowed, 1.0, np.inf)) is not None
            for case in ((self, replace(self, reach=0)) if self._partial else (self,))
        )

    def recomputed(self, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each stage of a split the layers that recompute."""
        ends, last = (
            self.ranges.ends,
            self.ranges.ends[-1] - 1,
        )  # the last makes the output and the loss, which run once
        bounds = [(ends[positions[part]], ends[positions[part + 1]]) for part in self.outline.part_of]
        if self.recompute != "auto":
            return tuple(tuple(range(a, min(b, last))) if self.recompute == "all" else () for a, b in bounds)
        begin, end = (np.array(positions)[self.part_of + side, None] for side in (0, 1))
        here = places(self.outline, self.seats, shared=True)
        found = fit(self.ranges, begin, end, here, may_recompute=True, smallest=True)
        taken = found.taken[:, 0].tolist()
        return tuple(chosen_layers(self.ranges, count, *bound) for count, bound in zip(taken, bounds, strict=True))

    def _solved(self) -> list[tuple[int, ...]]:
        """The splits with the least longest stage, the least bound, and the least Σ + (m − 1) · max."""
        work = np.where(self._by_part(~self.tables.allowed), np.inf, self._work)
        hops = np.zeros_like(work)
        hops[:-1] = self._hops[: self.parts - 1, :, None]
        found = [smallest_maximum(work), smallest_step(work, hops, self._repeats)]
        if self.outline.ways == 1:
            found.insert(1, smallest_maximum(np.where(self.tables.allowed, self.least_ends, np.inf)))
        return [split.positions for split in found if split]

    def _by_part(self, values: NDArray[Any]) -> NDArray[Any]:
        """Of the stages that hold the same part of the model the largest value."""
        if self.outline.ways == 1:
            return values
        return np.asarray(values.reshape(self.outline.ways, self.parts, *values.shape[1:]).max(axis=0))

    def baselines(self) -> list[tuple[int, ...]]:
        """The splits of simple rules, by positions; they need not fit."""
        rules = [rule(self.setting.profile, self.parts) for rule in BASELINES.values()]
        return [self.ranges.places(cuts) for cuts in rules if cuts is not None]

    @cached_property
    def _work(self) -> Floats:
        """Ticks that a part spends on one micro-batch, on average over its row, a band of as many parts."""
        work = np.zeros(self.tables.open.shape)
        for op, ticks in enumerate(self.tables.actions):
            counts = np.array([row.counts[op] for row in self.outline.rows], np.float64)
            if counts.any():
                work += counts[:, None, None] * ticks
        return self._by_part(work) * (self.outline.ways / self.outline.micro_batches)

    @property
    def _repeats(self) -> int:
        """How often the longest stage runs beyond the first micro-batch, in all updates of an asynchronous table."""
        return self.outline.micro_batches * self.outline.updates - 1

    @property
    def _hops(self) -> Floats:
        """Ticks that a micro-batch and its gradient spend on each hop, by the cut; shape (stages − 1, n + 1)."""
        return self.tables.activations + self.tables.gradients


def _key(found: Found) -> tuple[float, float, tuple[int, ...]]:
    """The shorter step; then less memory; then the last cut earlier, as in chain_dp."""
    return found.step_s, found.bytes, found.positions[::-1]
