"""Many splits of one case at once: which are allowed, what their ranks hold at most, what their actions cost.

A split is its positions, both ends included; many are an array of shape (splits, parts + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Link
from autopipe.core.schedule import stages_on
from autopipe.graph import Costs, late_of
from autopipe.loads import Load
from autopipe.planning.ladder import Floats
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.seats import Seats
from autopipe.planning.setting import Setting
from autopipe.planning.tables import Tables
from autopipe.planning.tied import Tied, Twice, in_splits, optimizer_ticks, twice
from autopipe.wires import wires_of

Positions = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Splits:
    """A case's tables, looked up for splits. ``loads`` is for each rank what it holds when that can be most.

    ``shared``: several stages on a rank have an equal part of its memory each, in which layers recompute.
    """

    ranges: Ranges
    outline: Outline
    tables: Tables
    hops: tuple[Link | None, ...]
    loads: Sequence[tuple[Load, ...]]
    shared: bool
    setting: Setting
    seats: Seats

    @cached_property
    def part_of(self) -> Positions:
        """For each stage its place in a split."""
        return np.array(self.outline.part_of, np.intp)

    def entries(self, splits: Positions) -> tuple[Positions, ...]:
        """Where the stages of splits are in range tables, arrays of shape (splits, stages) or (stages,)."""
        begin, end = splits[:, self.part_of], splits[:, self.part_of + 1]
        return np.arange(self.outline.stages), end, begin - end + self.tables.reach

    def allowed(self, splits: Positions) -> Positions:
        """The splits whose stages are within the tables' reach and allowed."""
        splits = splits[(np.diff(splits) <= self.tables.reach).all(axis=1)]
        return splits[self.tables.allowed[self.entries(splits)].all(axis=1)]

    def peaks(self, splits: Positions) -> Floats:
        """The peak of each rank, shape (splits, ranks); where layers recompute at most that."""
        alone = self.tables.peak_bytes[self.entries(splits)]
        if self.outline.stages == self.outline.ranks:
            return alone
        begin, end = self._bounds(splits)
        more = twice(self._ties(splits), self.setting.profile, self.setting.update(self.seats.replicas), begin.shape)
        peaks = np.zeros((len(splits), self.outline.ranks))
        if self.shared:
            for stage, rank in enumerate(self.outline.placement):
                peaks[:, rank] += alone[:, stage] - more.lasting[stage]
            return peaks
        for rank in range(self.outline.ranks):
            own = list(stages_on(self.outline.placement, rank))
            peaks[:, rank] = self._joint_peak(rank, begin[own].T, end[own].T, Twice(*(size[own].T for size in more)))
        return peaks

    def _bounds(self, splits: Positions) -> tuple[Positions, Positions]:
        """Where the stages begin and end, positions of shape (stages, splits)."""
        return splits.T[self.part_of], splits.T[self.part_of + 1]

    def _ties(self, splits: Positions) -> list[Tied]:
        return in_splits(self.setting.profile, self.ranges, self.outline, *self._bounds(splits))

    def _joint_peak(self, rank: int, begin: Positions, end: Positions, more: Twice) -> Floats:
        """The peak of a rank whose stages take these ranges, shape (splits,); each has one version of its weights.

        ``more`` is what they count too often, of shape (splits, stages on the rank).
        """
        before, behind = np.array([self.outline.kept[s] for s in stages_on(self.outline.placement, rank)]).T
        crossing = before * self.ranges.activations[begin] + behind * self.ranges.activations[end]
        lasting = self.ranges.static[begin, end] - self.ranges.gradient[begin, end] - more.lasting
        always = (lasting + crossing).sum(axis=1)
        held, left = self.ranges.held[begin, end], self.ranges.held_after_input_grad[begin, end]
        gradient = self.ranges.gradient[begin, end] - more.gradient
        workspace = self.ranges.workspace[begin, end]
        first = np.minimum(self.ranges.first_backward[begin, end] - held, gradient + workspace)
        running = np.maximum(workspace, first)
        moments = [
            held @ np.array(load.forwards)
            + left @ np.array(load.input_grads)
            + gradient @ np.array(load.gradients)
            + (running if load.first else workspace)[:, load.running]
            for load in self.loads[rank]
        ]
        return np.asarray(always + np.max(moments, axis=0))

    def costs(self, splits: Positions) -> Costs:
        """Their ticks, as the simulator takes them."""
        entries = self.entries(splits)
        cuts = splits[:, self.part_of[:-1] + 1]
        actions = np.stack([ticks[entries].T for ticks in self.tables.actions], axis=1)
        transfers = np.zeros((2, self.outline.stages, len(splits)))
        stage = np.arange(self.outline.stages - 1)
        transfers[0, 1:] = self.tables.activations[stage, cuts].T
        transfers[1, :-1] = self.tables.gradients[stage, cuts].T
        optimizer = self._optimizer(splits, entries)
        actions, transfers, optimizer = (
            np.ascontiguousarray(c.reshape(-1, len(splits))) for c in (actions, transfers, optimizer)
        )
        late, wires = late_of(self.hops), wires_of(self.hops)
        ticks = wires.in_ticks(self.ranges.tick_s) if wires else None
        return Costs(actions, transfers, optimizer, np.rint(late / self.ranges.tick_s), ticks)

    def _optimizer(self, splits: Positions, entries: tuple[Positions, ...]) -> Floats:
        """Ticks of the stages' optimizer steps, shape (stages, splits)."""
        if self.outline.stages == self.outline.ranks or not self.setting.profile.ties:
            return np.asarray(self.tables.optimizer[entries].T)
        given = self.ranges, self.outline, self.seats, *self._bounds(splits)
        return optimizer_ticks(*given, self._ties(splits), sharded=self.setting.sharded)
