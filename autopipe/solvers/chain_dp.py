"""The best way to cut a chain into stages, exactly, for any cost of a stage.

Between n pieces lie n + 1 positions. A table of shape (stages, n + 1, n + 1) says what stage s costs when it takes
the pieces from position a to position b; infinity where it may not (no room, an illegal cut, a pin). So memory that
depends on the stage's place, unequal devices and unequal links are all in the table.

Ties: among equal values the last cut is the earliest possible one, and the pieces before it are split by the same
rule. Time O(stages · n²) a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Split(NamedTuple):
    """Where stages begin and end, 0 and n included, and the objective's value."""

    positions: tuple[int, ...]
    value: float


def table(cost: Callable[[int, int, int], float], stages: int, pieces: int) -> Floats:
    """The table of a function (stage, start, stop) → cost; only start < stop is asked for."""
    costs = np.full((stages, pieces + 1, pieces + 1), np.inf)
    for stage in range(stages):
        for start in range(pieces):
            for stop in range(start + 1, pieces + 1):
                costs[stage, start, stop] = cost(stage, start, stop)
    return costs


def smallest_maximum(costs: Floats) -> Split | None:
    """The split whose most expensive stage is cheapest; None when there is none."""
    return _split(*_pass(costs, np.maximum))


def smallest_maxima(costs: Floats, most: int) -> Floats:
    """The value of smallest_maximum for 1 … ``most`` stages that all cost the same, shape (most,)."""
    values, _ = _pass(np.broadcast_to(costs, (most, *costs.shape)), np.maximum)
    return values[:, -1]


def smallest_sum(costs: Floats) -> Split | None:
    """The split with the smallest sum of costs; None when there is none."""
    return _split(*_pass(costs, np.add))


def prefix_sums(costs: Floats) -> Floats:
    """The smallest sum over the stages before stage s when it begins at position a, shape (stages, n + 1)."""
    values, _ = _pass(costs, np.add)
    return np.vstack([_origin(costs), values[:-1]])


def smallest_step(work: Floats, other: Floats, repeats: int) -> Split | None:
    """The split with the smallest Σ(work + other) + repeats · max(work); None when there is none.

    With repeats = micro-batches − 1 and transfers as ``other`` this is the step of a pipeline that flushes.
    The least sum with every stage's work ≤ z never grows with z. So of two thresholds low < high, none between them
    can beat sum(high) + repeats · low, and halving the interval where that still beats the best ends after a few
    passes, with the exact optimum.
    """
    first = smallest_maximum(work)
    loosest = smallest_sum(work + other)
    if first is None or loosest is None:
        return None
    levels = np.unique(work[np.isfinite(work) & (work >= first.value)])
    search = _Thresholds(work, other, repeats)
    high = search.solve(float(levels[-1]))
    search.halve(levels, 0, int(np.searchsorted(levels, high.maximum)), high.total)
    return search.best


class _Solved(NamedTuple):
    total: float
    maximum: float


class _Thresholds:
    """The best split seen so far, and the search for a better one."""

    def __init__(self, work: Floats, other: Floats, repeats: int) -> None:
        self.work, self.both, self.repeats = work, work + other, repeats
        self.best = Split((), np.inf)

    def solve(self, threshold: float) -> _Solved:
        """The least sum with every stage's work within the threshold; keeps the split when it is the best."""
        found = smallest_sum(np.where(self.work <= threshold, self.both, np.inf))
        if found is None:
            return _Solved(np.inf, np.inf)
        stages = zip(range(len(self.work)), found.positions, found.positions[1:], strict=False)
        maximum = max(float(self.work[stage]) for stage in stages)
        candidate = Split(found.positions, found.value + self.repeats * maximum)
        self.best = min(self.best, candidate, key=_tie_key)
        return _Solved(found.value, maximum)

    def halve(self, levels: Floats, low: int, high: int, total: float) -> None:
        """Search thresholds ``levels[low:high]``; ``total`` is the sum at ``levels[high]``."""
        if low >= high or total + self.repeats * levels[low] > self.best.value:
            return
        middle = (low + high) // 2
        solved = self.solve(float(levels[middle]))
        self.halve(levels, middle + 1, high, total)
        if np.isfinite(solved.total):
            self.halve(levels, low, int(np.searchsorted(levels, solved.maximum)), solved.total)


def _tie_key(split: Split) -> tuple[float, tuple[int, ...]]:
    return split.value, split.positions[::-1]


def _origin(costs: Floats) -> Floats:
    start = np.full(costs.shape[1], np.inf)
    start[0] = 0.0
    return start


def _pass(costs: Floats, join: np.ufunc) -> tuple[Floats, Indices]:
    """For each stage and position: the best value of the stages up to it, and where that stage begins."""
    stages, width, _ = costs.shape
    values, begins = np.empty((stages, width)), np.empty((stages, width), dtype=np.intp)
    before = _origin(costs)
    for stage in range(stages):
        joined = join(before[:, None], costs[stage])
        begins[stage] = joined.argmin(axis=0)
        values[stage] = before = joined[begins[stage], np.arange(width)]
    return values, begins


def _split(values: Floats, begins: Indices) -> Split | None:
    value = float(values[-1, -1])
    if not np.isfinite(value):
        return None
    positions = [values.shape[1] - 1]
    for stage in reversed(range(len(begins))):
        positions.append(int(begins[stage, positions[-1]]))
    return Split(tuple(reversed(positions)), value)
