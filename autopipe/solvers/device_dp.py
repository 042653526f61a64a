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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopipe.solvers import thresholds
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
    found = _Network(options, available, hops).best([option.work for option in options], np.maximum)
    return found.assigned if found else None


def smallest_step(
    options: Sequence[Option], available: Sequence[int], repeats: int, hops: Floats | None = None
) -> Assigned | None:
    """The stages with the smallest Σ(work + other) + Σ hops + repeats · max(work); None when there are none.

    With repeats = micro-batches − 1 this is the step of a pipeline that flushes.
    """
    network = _Network(options, available, hops)
    work = [option.work for option in options]
    both = [option.work if option.other is None else option.work + option.other for option in options]
    first = _Network(options, available, None).best(work, np.maximum)
    if first is None:
        return None

    def solve(threshold: float) -> _Found | None:
        return network.best([np.where(w <= threshold, b, np.inf) for w, b in zip(work, both, strict=True)], np.add)

    best = thresholds.smallest(solve, np.stack(work), first.assigned.value, repeats)
    return best.solution.assigned._replace(value=best.value) if best else None


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
"""Devices used of each class, and the last stage's option (−1 where transfers do not ask for it)."""


class _Column(NamedTuple):
    """Of one state: the best value by position; its last stage's begin and option, and the state before, by number."""

    values: Floats
    begins: Indices
    options: Indices
    states: Indices


@dataclass(frozen=True, eq=False)
class _Network:
    """The states and how stages lead from one to the next."""

    options: Sequence[Option]
    available: Sequence[int]
    hops: Floats | None

    def best(self, costs: Sequence[Floats], join: np.ufunc) -> _Found | None:
        """The best stages under ``join`` of the costs, a table for each option."""
        stages, width, _ = costs[0].shape
        origin = np.full(width, np.inf)
        origin[0] = 0.0
        nowhere = np.zeros(width, dtype=np.intp)
        start = ((0,) * len(self.available), -1)
        columns: list[dict[_State, _Column]] = [{start: _Column(origin, nowhere, nowhere, nowhere)}]
        for stage in range(stages):
            columns.append(self._after(columns[-1], [table[stage] for table in costs], join))
        ends = sorted(columns[-1], key=lambda state: (columns[-1][state].values[-1], sum(state[0]), state))
        if not ends or not np.isfinite(columns[-1][ends[0]].values[-1]):
            return None
        return self._traced(columns, ends[0])

    def _after(self, before: dict[_State, _Column], costs: Sequence[Floats], join: np.ufunc) -> dict[_State, _Column]:
        """The states one stage later."""
        result: dict[_State, _Column] = {}
        states = sorted(before)
        numbers = {state: number for number, state in enumerate(states)}
        for uses, option, sources in self._arrivals(states):
            reached = np.stack([self._reached(before[state].values, state, option, join) for state in sources])
            source = reached.argmin(axis=0)
            ahead = reached[source, np.arange(len(source))]
            joined = join(ahead[:, None], costs[option])
            begins = joined.argmin(axis=0)
            state_before = np.array([numbers[state] for state in sources])[source[begins]]
            values = joined[begins, np.arange(len(begins))]
            new = _Column(values, begins, np.full(len(begins), option), state_before)
            target = (uses, option if self.hops is not None else -1)
            result[target] = _better(result[target], new) if target in result else new
        return result

    def _arrivals(self, states: Sequence[_State]) -> Iterator[tuple[tuple[int, ...], int, list[_State]]]:
        """Devices used after a stage of some option, that option, and the states before it."""
        arrivals: dict[tuple[tuple[int, ...], int], list[_State]] = defaultdict(list)
        for option, each in enumerate(self.options):
            for state in states:
                used = list(state[0])
                used[each.device] += each.count
                if used[each.device] <= self.available[each.device]:
                    arrivals[tuple(used), option].append(state)
        for (uses, option), sources in sorted(arrivals.items()):
            yield uses, option, sources

    def _reached(self, values: Floats, state: _State, option: int, join: np.ufunc) -> Floats:
        if self.hops is None or state[1] < 0:
            return values
        return np.asarray(join(values, self.hops[state[1], option]))

    def _traced(self, columns: Sequence[dict[_State, _Column]], state: _State) -> _Found:
        """The stages that lead to a state at the last position."""
        uses, value = state[0], float(columns[-1][state].values[-1])
        positions, options, maximum = [len(columns[-1][state].values) - 1], [], 0.0
        for stage in reversed(range(len(columns) - 1)):
            column, stop = columns[stage + 1][state], positions[-1]
            option = int(column.options[stop])
            positions.append(int(column.begins[stop]))
            options.append(option)
            maximum = max(maximum, float(self.options[option].work[stage, positions[-1], stop]))
            state = sorted(columns[stage])[int(column.states[stop])]
        return _Found(Assigned(tuple(positions[::-1]), tuple(options[::-1]), value), uses, maximum)


def _better(old: _Column, new: _Column) -> _Column:
    """By position, the old one where they are equal."""
    return _Column(*(np.where(new.values < old.values, b, a) for a, b in zip(old, new, strict=True)))
