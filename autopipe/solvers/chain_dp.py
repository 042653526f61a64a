"""The best way to cut a chain into stages, exactly, for any cost of a stage.

Between n pieces lie n + 1 positions. A table of shape (stages, n + 1, n + 1) says what stage s costs when it takes
the pieces from position a to position b; infinity where it may not (no room, an illegal cut, a pin). So memory that
depends on the stage's place, unequal devices, unequal links, replicas and recomputed layers are all in the table.
Where the device of a stage is open too, see device_dp; where its replicas are, replicas.

Where long ranges cannot matter the table of all but smallest_end may be a band of shape (stages, n + 1, w), w ≤ n (see
bands).

Ties: among equal values the last cut is the earliest possible one, and the pieces before it are split by the same
rule. Time O(stages · n · w) a pass, w = n without a band.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.solvers import bands, thresholds

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

_LARGEST = float(np.finfo(np.float64).max)


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


def suffix_sums(costs: Floats) -> Floats:
    """The smallest sum over the stages after stage s when they begin at position a, shape (stages, n + 1)."""
    return suffix_ways(costs, costs)


def suffix_ways(alone: Floats, through: Floats) -> Floats:
    """The smallest longest way over the stages after stage s when they begin at position a, shape (stages, n + 1).

    A way goes ``through`` some of them, one after the other, and ends with what the next one takes ``alone``, which is
    at least what it takes to go through.
    """
    stages, width, reach = alone.shape
    result = np.full((stages, width), np.inf)
    result[-1, -1] = 0.0
    for stage in reversed(range(1, stages)):
        after = through[stage] + (result[stage] if reach == width else result[stage][:, None])
        both = np.maximum(alone[stage], after)
        result[stage - 1] = (both if reach == width else bands.by_begin(both)).min(axis=1)
    return result


def cost_of(costs: Floats, stage: int, start: int, stop: int) -> float:
    """A stage's cost for a range, whether the table is a band or not."""
    _, width, reach = costs.shape
    return float(costs[stage, start, stop] if reach == width else costs[stage, stop, start - stop + reach])


def smallest_step(work: Floats, other: Floats, repeats: int) -> Split | None:
    """The split with the smallest Σ(work + other) + repeats · max(work); None when there is none.

    With repeats = micro-batches − 1 and transfers as ``other`` this is the step of a pipeline that flushes.
    """
    first, both = smallest_maximum(work), work + other
    if first is None:
        return None

    def solve(threshold: float) -> _Summed | None:
        found = smallest_sum(np.where(work <= threshold, both, np.inf))
        return _Summed(found, max(_of_stages(work, found.positions))) if found else None

    best = thresholds.smallest(solve, work, first.value, repeats)
    return Split(best.solution.split.positions, best.value) if best else None


def smallest_end(heads: Floats, ends: Floats) -> Split | None:
    """The split with the smallest maximum over stages s of Σ heads[before s] + ends[s]; None when there is none.

    The form of schedules whose step ends with one stage's row: what a stage waits for its first micro-batch and what
    must still happen after its last gradient grow with the stages before it (``heads``: F, I or B, and transfers),
    its own work does not (``ends``: the row, the weight gradients behind it, the optimizer).

    A smaller sum before a stage is never worse. So a value z can be reached just when the least sums, over stages
    that end by z, get to the last position; and when they do not, the earliest end above z bounds all values. Among
    equal values the sum of heads is the least, then the last cut the earliest.
    """
    best, _ = _ending_by(heads, ends, _LARGEST)
    quick = smallest_maximum(prefix_sums(heads)[:, :, None] + ends)
    if best is None or quick is None:
        return None
    low = quick.value
    while low < best.value:
        middle = (low + best.value) / 2
        found, later = _ending_by(heads, ends, middle if middle < best.value else low)
        best, low = (found, low) if found else (best, later)
    return _ending_by(heads, ends, best.value)[0]


class _Summed(NamedTuple):
    split: Split
    maximum: float

    @property
    def total(self) -> float:
        return self.split.value

    @property
    def order(self) -> tuple[int, ...]:
        return self.split.positions[::-1]


def _of_stages(costs: Floats, positions: tuple[int, ...]) -> list[float]:
    return [cost_of(costs, stage, a, b) for stage, (a, b) in enumerate(pairwise(positions))]


def _ended(heads: Floats, ends: Floats, split: Split) -> Split:
    """The split with its value under smallest_end."""
    before = np.cumsum([0.0, *_of_stages(heads, split.positions)[:-1]])
    return Split(split.positions, float(np.max(before + _of_stages(ends, split.positions))))


def _ending_by(heads: Floats, ends: Floats, limit: float) -> tuple[Split | None, float]:
    """The split with the least sum of heads whose stages all end by ``limit``, and the earliest end after it.

    The split carries its value under smallest_end.
    """
    stages, width, _ = heads.shape
    begins, later = np.empty((stages, width), dtype=np.intp), np.inf
    before = _origin(heads)
    for stage in range(stages):
        ending = before[:, None] + ends[stage]
        in_time = ending <= limit
        later = min(later, float(np.min(ending, initial=np.inf, where=~in_time)))
        joined = np.where(in_time, before[:, None] + heads[stage], np.inf)
        begins[stage] = joined.argmin(axis=0)
        before = joined[begins[stage], np.arange(width)]
    split = _split(before[None], begins)
    return (_ended(heads, ends, split) if split else None), later


def _origin(costs: Floats) -> Floats:
    start = np.full(costs.shape[1], np.inf)
    start[0] = 0.0
    return start


def _pass(costs: Floats, join: np.ufunc) -> tuple[Floats, Indices]:
    """For each stage and position: the best value of the stages up to it, and where that stage begins."""
    stages, width, reach = costs.shape
    values, begins = np.empty((stages, width)), np.empty((stages, width), dtype=np.intp)
    before, every = _origin(costs), np.arange(width)
    for stage in range(stages):
        if reach == width:
            joined = join(before[:, None], costs[stage])
            begins[stage] = joined.argmin(axis=0)
            values[stage] = before = joined[begins[stage], every]
        else:
            joined = join(bands.before(before, reach), costs[stage])
            column = joined.argmin(axis=1)
            begins[stage] = every - reach + column
            values[stage] = before = joined[every, column]
    return values, begins


def _split(values: Floats, begins: Indices) -> Split | None:
    value = float(values[-1, -1])
    if not np.isfinite(value):
        return None
    positions = [values.shape[1] - 1]
    for stage in reversed(range(len(begins))):
        positions.append(int(begins[stage, positions[-1]]))
    return Split(tuple(reversed(positions)), value)
