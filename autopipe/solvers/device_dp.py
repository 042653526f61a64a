"""The best way to cut a chain into stages and to give each stage its devices, exactly.

There are classes of equal devices. An ``Option`` is one way to run a stage: on one device of a fast class, on two
replicas of a slow one. What it costs then is a table as chain_dp takes it. For each number of stages so far, devices
used by them and, where transfers depend on both sides, last option, a dynamic program keeps the best value for every
position. Equal devices are counted, not named, so their order cannot matter.

Ties: the fewest devices; then, from the last stage backwards, the earliest option in the list, the earliest cut, and
the devices used before it in ascending order. Time O(stages · states · options · n²) a pass; with c classes of k
devices there are at most kᶜ states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopipe.solvers import thresholds
from autopipe.solvers.bands import banded, before, least_of_lengths, longest
from autopipe.solvers.chain_dp import Floats, Indices


@dataclass(frozen=True, eq=False)
class Option:
    """One way to run a stage: on ``count`` devices of class ``device``.

    ``work`` and ``other`` have shape (stages, n + 1, n + 1); where ``other`` is not given it is 0.
    """

    device: int
    work: Floats
    other: Floats | None = None
    count: int = 1


class Assigned(NamedTuple):
    """Where stages begin and end, 0 and n included, the number of each stage's option, and the objective's value."""

    positions: tuple[int, ...]
    options: tuple[int, ...]
    value: float


def smallest_maximum(
    options: Sequence[Option], available: Sequence[int], hops: Floats | None = None
) -> Assigned | None:
    """The stages whose most expensive one is cheapest, by ``work``; None when there are none.

    ``hops[a, b, c]`` is the transfer over a cut at position c from a stage of option a to one of option b. It counts
    as a stage of its own: transfers overlap with work.
    """
    works = _works(options)
    found = _Network(options, available, hops).best(banded(works, _most(works)), np.maximum)
    return found.assigned if found else None


def smallest_step(
    options: Sequence[Option], available: Sequence[int], repeats: int, hops: Floats | None = None
) -> Assigned | None:
    """The stages with the smallest Σ(work + other) + Σ hops + repeats · max(work); None when there are none.

    With repeats = micro-batches − 1 this is the step of a pipeline that flushes.
    """
    work = _works(options)
    both = np.stack([each.work if each.other is None else each.work + each.other for each in options])
    first = _Network(options, available, None).best(banded(work, _most(work)), np.maximum)
    if first is None:
        return None
    network, least = _Network(options, available, hops), least_of_lengths(work)

    def solve(threshold: float) -> _Found | None:
        length = min(longest(least, threshold), _most(work))
        within = banded(work, length) <= threshold
        return network.best(np.where(within, banded(both, length), np.inf), np.add)

    best = thresholds.smallest(solve, work, first.assigned.value, repeats)
    return best.solution.assigned._replace(value=best.value) if best else None


def _works(options: Sequence[Option]) -> Floats:
    return np.stack([option.work for option in options])


def _most(works: Floats) -> int:
    """The most pieces that a stage can have: each other stage has one."""
    return max(int(works.shape[-1] - works.shape[1]), 1)


class _Found(NamedTuple):
    """A solution, its devices, and the work of its longest stage."""

    assigned: Assigned
    uses: tuple[int, ...]
    maximum: float

    @property
    def total(self) -> float:
        return self.assigned.value

    @property
    def order(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        return sum(self.uses), self.assigned.options[::-1], self.assigned.positions[::-1]


_State = tuple[tuple[int, ...], int]
"""Devices used of each class, and the last stage's option (-1 where transfers do not ask for it)."""


class _Arrivals(NamedTuple):
    """How stages of one option lead on: for each state that they lead to, the states before, by number.

    Rows of ``sources`` are ascending; −1 fills them up.
    """

    targets: Indices
    sources: Indices


class _Columns(NamedTuple):
    """Of all states of a stage, shape (states, n + 1): the best value by position, and how it is reached."""

    values: Floats
    begins: Indices
    options: Indices
    sources: Indices


class _Network:
    """The states after each stage, and how stages lead from one to the next."""

    def __init__(self, options: Sequence[Option], available: Sequence[int], hops: Floats | None) -> None:
        self.options, self.available, self.hops = options, available, hops
        self.states: list[list[_State]] = [[((0,) * len(available), -1)]]
        self.arrivals: list[list[_Arrivals]] = []
        for _ in range(len(options[0].work)):
            states, arrivals = self._next(self.states[-1])
            self.states.append(states)
            self.arrivals.append(arrivals)

    def _next(self, states: Sequence[_State]) -> tuple[list[_State], list[_Arrivals]]:
        sources: list[dict[_State, list[int]]] = [defaultdict(list) for _ in self.options]
        for option, each in enumerate(self.options):
            for number, (uses, _) in enumerate(states):
                used = list(uses)
                used[each.device] += each.count
                if used[each.device] <= self.available[each.device]:
                    sources[option][tuple(used), option if self.hops is not None else -1].append(number)
        reached = sorted({state for each in sources for state in each})
        numbers = {state: number for number, state in enumerate(reached)}
        return reached, [_arrivals(each, numbers) for each in sources]

    def best(self, bands: Floats, join: np.ufunc) -> _Found | None:
        """The best stages under ``join`` of the costs, a band of shape (stages, n + 1, k) for each option."""
        width = bands.shape[-2]
        values = np.full((1, width), np.inf)
        values[0, 0] = 0.0
        columns: list[_Columns] = []
        for stage, arrivals in enumerate(self.arrivals):
            columns.append(self._after(stage, values, arrivals, bands[:, stage], join))
            values = columns[-1].values
        ends = [(float(v), sum(state[0]), state) for v, state in zip(values[:, -1], self.states[-1], strict=True)]
        best = min(ends, default=None)
        return self._traced(columns, best[2], best[0]) if best and np.isfinite(best[0]) else None

    def _after(
        self, stage: int, values: Floats, arrivals: Sequence[_Arrivals], bands: Floats, join: np.ufunc
    ) -> _Columns:
        """The columns of the states after a stage."""
        shape = len(self.states[stage + 1]), values.shape[1]
        result = _Columns(np.full(shape, np.inf), *(np.zeros(shape, dtype=np.intp) for _ in range(3)))
        for option, (targets, sources) in enumerate(arrivals):
            if len(targets):
                reached = np.concatenate([self._reached(stage, values, option, join), np.full((1, shape[1]), np.inf)])
                source, ahead = _first(reached[sources].transpose(0, 2, 1))
                column, found = _first(join(before(ahead, bands.shape[-1]), bands[option]))
                begins = np.maximum(column + np.arange(shape[1]) - bands.shape[-1], 0)
                row = np.arange(len(targets))[:, None]
                origin = sources[row, source[row, begins]]
                _keep(result, targets, _Columns(found, begins, np.full_like(begins, option), origin))
        return result

    def _reached(self, stage: int, values: Floats, option: int, join: np.ufunc) -> Floats:
        """The values with the transfer to a stage of the option."""
        if self.hops is None or stage == 0:
            return values
        return np.asarray(join(values, self.hops[[last for _, last in self.states[stage]], option]))

    def _traced(self, columns: Sequence[_Columns], state: _State, value: float) -> _Found:
        """The stages that lead to a state at the last position."""
        row, uses = self.states[-1].index(state), state[0]
        positions, options, maximum = [columns[-1].values.shape[1] - 1], [], 0.0
        for stage in reversed(range(len(columns))):
            column, stop = columns[stage], positions[-1]
            options.append(int(column.options[row, stop]))
            positions.append(int(column.begins[row, stop]))
            maximum = max(maximum, float(self.options[options[-1]].work[stage, positions[-1], stop]))
            row = int(column.sources[row, stop])
        return _Found(Assigned(tuple(positions[::-1]), tuple(options[::-1]), value), uses, maximum)


def _arrivals(sources: Mapping[_State, Sequence[int]], numbers: Mapping[_State, int]) -> _Arrivals:
    most = max(map(len, sources.values()), default=0)
    rows = [[*each, *[-1] * (most - len(each))] for each in sources.values()]
    targets = np.array([numbers[state] for state in sources], dtype=np.intp)
    return _Arrivals(targets, np.array(rows, dtype=np.intp).reshape(len(rows), most))


def _first(values: Floats) -> tuple[Indices, Floats]:
    """Where the smallest values along the last axis are first, and the values."""
    rows = values.reshape(-1, values.shape[-1])
    index = rows.argmin(axis=1)
    shape = values.shape[:-1]
    return index.reshape(shape), rows[np.arange(len(rows)), index].reshape(shape)


def _keep(columns: _Columns, rows: Indices, new: _Columns) -> None:
    """Put better values into the rows; where they are equal the old ones stay."""
    better = new.values < columns.values[rows]
    for column, fresh in zip(columns, new, strict=True):
        column[rows] = np.where(better, fresh, column[rows])
