"""How many replicas each stage gets, for any number of devices: the smallest longest stage, exactly.

For a threshold z the fewest devices that hold the pieces up to each position need one pass of O(n²), however many
devices there are; the interval of z is halved until nothing in between would change. There are as many stages as help.

Ties: the fewest devices, then the last cut earliest, and the pieces before it by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from autopipe.solvers.chain_dp import Floats, Indices

_LARGEST = float(np.finfo(np.float64).max)
_ROUNDING = 1e-9
"""By so much of itself a guess at the number of replicas may be off."""


class Replicated(NamedTuple):
    """Where stages begin and end, 0 and n included, the replicas of each, and the longest stage's cost."""

    positions: tuple[int, ...]
    replicas: tuple[int, ...]
    value: float


class Scaling(Protocol):
    """What ranges of pieces cost on so many replicas; tables have shape (n + 1, n + 1)."""

    def cost(self, start: int, stop: int, replicas: int) -> float:
        """The cost of the pieces from ``start`` to ``stop``."""

    def needed(self, limit: float) -> tuple[Floats, float]:
        """The fewest replicas on which each range costs at most ``limit``, infinite where there are none.

        Also the least limit above this one with which a range would need fewer.
        """


class Ring:
    """``(work − reduced) / r + reduced`` on r replicas: a batch divided among them, and a ring all-reduce.

    ``work`` is infinite where a range must not be. ``reduced`` is twice the seconds that the range's gradients take
    over the link, or that divided by the micro-batches where work is one micro-batch's: a ring sends (r − 1) / r of
    the gradients twice. ``choices`` are the numbers of replicas that may be used, ascending.
    """

    def __init__(self, work: Floats, reduced: Floats, choices: Sequence[int]) -> None:
        self._work, self._reduced = work, reduced
        self._possible = np.isfinite(work)
        self._fixed = reduced[self._possible]
        self._divided = work[self._possible] - self._fixed
        self._choices = np.array(choices)
        self._next = np.searchsorted(self._choices, np.arange(choices[-1] + 1))

    def cost(self, start: int, stop: int, replicas: int) -> float:
        """See Scaling."""
        reduced = float(self._reduced[start, stop])
        return (float(self._work[start, stop]) - reduced) / replicas + reduced

    def needed(self, limit: float) -> tuple[Floats, float]:
        """See Scaling. The cost of a range only grows, or only shrinks, with r."""
        needed = np.full(self._work.shape, np.inf)
        index, enough = self._indices(limit)
        needed[self._possible] = np.where(enough, self._choices[index], np.inf)
        fewer = np.where(enough, index - 1, 0)
        later = self._costs(np.maximum(fewer, 0))[fewer >= 0]
        most = self._costs(np.array(len(self._choices) - 1))[~enough]
        return needed, float(min(later.min(initial=np.inf), most.min(initial=np.inf)))

    def _costs(self, index: Indices) -> Floats:
        return np.asarray(self._divided / self._choices[index] + self._fixed)

    def _indices(self, limit: float) -> tuple[Indices, NDArray[np.bool_]]:
        """The first choice within the limit, and whether it is; guessed, then checked against the costs themselves."""
        last = len(self._choices) - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            guess = np.ceil(self._divided / (limit - self._fixed) * (1 - _ROUNDING))
        guess = np.where(self._costs(np.array(0)) <= limit, 0, guess)
        index = self._next[np.clip(np.nan_to_num(guess), 0, self._choices[-1]).astype(np.intp)]
        index = np.minimum(index + (self._costs(index) > limit), last)
        for wrong in np.flatnonzero(self._misses(index, limit)):
            index[wrong] = self._first(wrong, limit)
        return index, self._costs(index) <= limit

    def _misses(self, index: Indices, limit: float) -> NDArray[np.bool_]:
        """Where a guess is not the first choice: the limit is within rounding of what no replica makes cheaper."""
        high = (index > 0) & (self._costs(np.maximum(index - 1, 0)) <= limit)
        low = (self._costs(index) > limit) & (self._costs(np.array(len(self._choices) - 1)) <= limit)
        return np.asarray(high | low)

    def _first(self, place: np.intp, limit: float) -> np.intp:
        """The first choice within the limit, by trying all; there is one."""
        return np.argmax(self._divided[place] / self._choices + self._fixed[place] <= limit)


def smallest_longest(scaling: Scaling, devices: int) -> Replicated | None:
    """The stages and replicas on at most so many devices whose longest stage is shortest; None when there are none."""
    best, _ = _within(scaling, devices, _LARGEST)
    if best is None:
        return None
    low = 0.0
    while low < best.value:
        middle = (low + best.value) / 2
        found, later = _within(scaling, devices, middle if middle < best.value else low)
        best, low = (found, low) if found else (best, later)
    return _within(scaling, devices, best.value)[0]


def _within(scaling: Scaling, devices: int, limit: float) -> tuple[Replicated | None, float]:
    """The stages of at most ``limit`` on the fewest devices, None when they need more; and the next limit to try."""
    needed, later = scaling.needed(limit)
    totals, begins = _totals(np.ascontiguousarray(needed.T))
    if totals[-1] > devices:
        return None, later
    positions = [len(totals) - 1]
    while positions[-1]:
        positions.append(int(begins[positions[-1]]))
    ranges = [*pairwise(reversed(positions))]
    replicas = tuple(int(needed[a, b]) for a, b in ranges)
    value = max(scaling.cost(a, b, count) for (a, b), count in zip(ranges, replicas, strict=True))
    return Replicated(tuple(reversed(positions)), replicas, value), later


def _totals(needed: Floats) -> tuple[Floats, Indices]:
    """The fewest devices for the pieces up to each position, and where the last stage begins; rows are its ends."""
    width = len(needed)
    totals, begins = np.zeros(width), np.zeros(width, dtype=np.intp)
    for stop in range(1, width):
        sums = totals[:stop] + needed[stop, :stop]
        begins[stop] = first = sums.argmin()
        totals[stop] = sums[first]
    return totals, begins
