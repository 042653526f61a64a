"""A case: one depth, micro-batch size, schedule and rule for recomputation; all that is open is where to cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.baselines import BASELINES
from autopipe.core.schedule import Schedule
from autopipe.planning.bounds import least_ends, quick_bound_s
from autopipe.planning.ranges import Floats, Ranges
from autopipe.planning.recompute import chosen_layers
from autopipe.planning.tables import Setting, Tables, tables
from autopipe.simulate import OPS, Costs, Graph, late_of, peak_loads
from autopipe.solvers.brute import splits
from autopipe.solvers.chain_dp import Split, smallest_maximum, smallest_step
from autopipe.wires import wires_of

_FEW = 2000
"""Up to so many splits are all simulated."""

_NEAR = 4
"""Two cuts are moved independently when they are at most so many stages apart."""


class Found(NamedTuple):
    """A split of a case: its positions, the seconds of its step, and the highest peak of its ranks."""

    positions: tuple[int, ...]
    step_s: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Case:
    """One depth, micro-batch size, schedule, and rule for recomputation (``none``, ``all`` or ``auto``)."""

    setting: Setting
    ranges: Ranges
    schedule: Schedule
    micro_batch: int
    recompute: str

    @property
    def depth(self) -> int:
        """How many ranks it uses."""
        return self.schedule.ranks

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.schedule.stages

    @cached_property
    def tables(self) -> Tables:
        """What every range costs on every stage."""
        return tables(self.setting, self.ranges, self.schedule, may_recompute=self.recompute == "auto")

    @cached_property
    def graph(self) -> Graph:
        """The order, ready to be walked."""
        return Graph.of(self.schedule)

    @cached_property
    def least_ends(self) -> Floats:
        """The earliest end of a step by the range of each stage; see bounds."""
        return least_ends(self.tables, self.schedule)

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no split, and no choice of layers to recompute, can beat; infinite where none fits."""
        found = smallest_maximum(self.least_ends)
        batches = self.schedule.micro_batches
        quick_s = quick_bound_s(
            self.setting, self.ranges, self.depth, batches, stages_per_rank=self.stages // self.depth
        )
        return max(found.value * self.ranges.tick_s, quick_s) if found else float("inf")

    @cached_property
    def best(self) -> Found | None:
        """The best split that fits, None when none does: of all splits where they are few, else by moving cuts."""
        if comb(self.ranges.pieces - 1, self.stages - 1) > _FEW:
            return self.refined()
        return min(self.measured(splits(self.ranges.pieces, self.stages)), key=_key, default=None)

    def refined(self) -> Found | None:
        """The best that moving cuts reaches from the solvers' splits, or a baseline where that is better."""
        moved = map(self._moved, self.measured(dict.fromkeys(self._solved())))
        return min([*moved, *self.measured(self._baselines())], key=_key, default=None)

    def _moved(self, found: Found) -> Found:
        """A split's cuts moved while the step gets shorter: one by one, and where that does not help, together."""
        better: Found | None = found
        while better is not None:
            found = better
            moves = (self.measured(move(found.positions)) for move in (_single_moves, _joint_moves))
            steps = (min(measured, key=_key, default=found) for measured in moves)
            better = next((step for step in steps if step.step_s < found.step_s), None)
        return found

    def measured(self, positions: Iterable[tuple[int, ...]]) -> list[Found]:
        """The splits that are allowed, simulated all at once."""
        table = np.array([*positions], dtype=np.intp).reshape(-1, self.stages + 1)
        stage = np.arange(self.stages)
        table = table[self.tables.allowed[stage, table[:, :-1], table[:, 1:]].all(axis=1)]
        peaks = self._peaks(table)
        fit = (peaks <= np.array(self.setting.limits[: self.depth])).all(axis=1)
        table, peaks = table[fit], peaks[fit].max(axis=1)
        if not len(table):
            return []
        steps = self.graph.steps(self.costs(table)) * self.ranges.tick_s
        return [Found(tuple(map(int, row)), float(s), float(b)) for row, s, b in zip(table, steps, peaks, strict=True)]

    def _peaks(self, positions: NDArray[np.intp]) -> Floats:
        """The peak of each rank, shape (splits, ranks); where layers recompute at most that."""
        begin, end = positions[:, :-1], positions[:, 1:]
        stage = np.arange(self.stages)
        alone = self.tables.peak_bytes[stage, begin, end]
        if self.stages == self.depth:
            return alone
        peaks = np.zeros((len(positions), self.depth))
        if self.recompute == "auto":
            for s, rank in enumerate(self.schedule.placement):
                peaks[:, rank] += alone[:, s]
            return peaks
        for rank in range(self.depth):
            own = [s for s, where in enumerate(self.schedule.placement) if where == rank]
            peaks[:, rank] = self._joint_peak(rank, begin[:, own], end[:, own])
        return peaks

    def _joint_peak(self, rank: int, begin: NDArray[np.intp], end: NDArray[np.intp]) -> Floats:
        """The peak of a rank whose stages take these ranges, shape (splits,)."""
        always = self.ranges.always(self.schedule.micro_batches)[begin, end].sum(axis=1)
        held, left = self.ranges.held[begin, end], self.ranges.held_after_input_grad[begin, end]
        gradient, workspace = self.ranges.gradient[begin, end], self.ranges.workspace[begin, end]
        first = np.minimum(self.ranges.first_backward[begin, end] - held, gradient + workspace)
        running = np.maximum(workspace, first)
        moments = [
            held @ np.array(load.forwards)
            + left @ np.array(load.input_grads)
            + gradient @ np.array(load.gradients)
            + (running if load.first else workspace)[:, load.running]
            for load in peak_loads(self.schedule, rank)
        ]
        return np.asarray(always + np.max(moments, axis=0))

    def costs(self, positions: NDArray[np.intp]) -> Costs:
        """The ticks of many splits, positions of shape (splits, stages + 1), as the simulator takes them."""
        stage, begin, end = np.arange(self.stages), positions[:, :-1], positions[:, 1:]
        actions = self.tables.actions[:, stage, begin, end].transpose(2, 0, 1)
        transfers = np.zeros((2, self.stages, len(positions)))
        transfers[0, 1:] = self.tables.activations[stage[:-1], end[:, :-1]].T
        transfers[1, :-1] = self.tables.gradients[stage[:-1], end[:, :-1]].T
        optimizer = self.tables.optimizer[stage, begin, end].T
        actions, transfers, optimizer = (
            np.ascontiguousarray(c.reshape(-1, len(positions))) for c in (actions, transfers, optimizer)
        )
        late = late_of(self.setting.hops(self.schedule.placement))
        wires = wires_of(self.setting.hops(self.schedule.placement))
        ticks = wires.in_ticks(self.ranges.tick_s) if wires else None
        return Costs(actions, transfers, optimizer, np.rint(late / self.ranges.tick_s), ticks)

    def least_memory(self) -> Split | None:
        """The split that exceeds its limits least, by its ``value`` in bytes; None when the pins leave none."""
        limits = np.array([self.setting.limits[rank] for rank in self.schedule.placement])[:, None, None]
        return smallest_maximum(np.where(self.tables.open, self.tables.peak_bytes - limits, np.inf))

    def fits(self) -> bool:
        """Whether any split fits; with several stages on a rank, whether any is found."""
        if self.stages > self.depth:
            return self.best is not None
        split = self.least_memory()
        return split is not None and split.value <= 0

    def recomputed(self, positions: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each stage of a split the layers that recompute."""
        result = []
        last = self.ranges.ends[-1] - 1  # it makes the output and the loss, which run once
        for stage, (a, b) in enumerate(pairwise(positions)):
            start, stop = self.ranges.ends[a], self.ranges.ends[b]
            some = chosen_layers(self.ranges, int(self.tables.taken[stage, a, b]), start, stop)
            result.append(tuple(range(start, min(stop, last))) if self.recompute == "all" else some)
        return tuple(result)

    def _solved(self) -> list[tuple[int, ...]]:
        """The splits with the least longest stage, the least bound, and the least Σ + (m − 1) · max."""
        work = np.where(self.tables.allowed, self._work(), np.inf)
        ends = np.where(self.tables.allowed, self.least_ends, np.inf)
        hops = np.zeros_like(work)
        hops[:-1] = (self.tables.activations + self.tables.gradients)[:, None, :]
        step = smallest_step(work, hops, self.schedule.micro_batches - 1)
        return [split.positions for split in (smallest_maximum(work), smallest_maximum(ends), step) if split]

    def _baselines(self) -> list[tuple[int, ...]]:
        rules = [rule(self.setting.profile, self.stages) for rule in BASELINES.values()]
        return [self.ranges.places(cuts) for cuts in rules if cuts is not None]

    def _work(self) -> Floats:
        """Ticks that a stage spends on one micro-batch, on average over its row."""
        counts = np.zeros((len(OPS), self.stages, 1, 1))
        for row in self.schedule.order:
            for action in row:
                counts[OPS.index(action.op), action.stage] += 1
        return np.asarray((counts * self.tables.actions).sum(axis=0) / self.schedule.micro_batches)


def _key(found: Found) -> tuple[float, float, tuple[int, ...]]:
    """The shorter step; then less memory; then the last cut earlier, as in chain_dp."""
    return found.step_s, found.bytes, found.positions[::-1]


def _single_moves(positions: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every cut moved by one or two pieces."""
    return _shifted(positions, [{cut: by} for cut in range(1, len(positions) - 1) for by in (-2, -1, 1, 2)])


def _joint_moves(positions: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every run of neighbouring cuts moved by one piece, and every two near ones by one piece each."""
    pairs = list(combinations(range(1, len(positions) - 1), 2))
    shifts = [dict.fromkeys(range(a, b + 1), by) for a, b in pairs for by in (-1, 1)]
    shifts += [{a: x, b: y} for a, b in pairs if b - a <= _NEAR for x in (-1, 1) for y in (-1, 1)]
    return _shifted(positions, shifts)


def _shifted(positions: tuple[int, ...], shifts: Sequence[dict[int, int]]) -> list[tuple[int, ...]]:
    moved = (tuple(p + shift.get(k, 0) for k, p in enumerate(positions)) for shift in shifts)
    return [p for p in moved if all(x < y for x, y in pairwise(p))]
