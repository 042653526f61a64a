"""How many replicas each stage gets, for any number of devices: the smallest longest stage, exactly.

For a threshold z the fewest devices that hold the pieces up to each position need one pass of O(n²), however many
devices there are; z is halved until no number lies between. There are as many stages as help.

Ties: the fewest devices, then the last cut earliest, and the pieces before it by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    def needed(self, limit: float) -> Floats:
        """The fewest replicas on which each range costs at most ``limit``; infinite where there are none."""


@dataclass(frozen=True, eq=False)
class Ring:
    """``(work − reduced) / r + reduced`` on r replicas: a batch divided among them, and a ring all-reduce.

    ``work`` is infinite where a range must not be. ``reduced`` is twice the seconds that the range's gradients take
    over the link, or that divided by the micro-batches where work is one micro-batch's: a ring sends (r − 1) / r of
    the gradients twice. ``choices`` are the numbers of replicas that may be used, ascending.
    """

    work: Floats
    reduced: Floats
    choices: NDArray[np.intp]

    def cost(self, start: int, stop: int, replicas: int) -> float:
        """See Scaling."""
        work, reduced = float(self.work[start, stop]), float(self.reduced[start, stop])
        return (work - reduced) / replicas + reduced

    def needed(self, limit: float) -> Floats:
        """See Scaling. The cost only grows, or only shrinks, with r."""

        def costs(replicas: NDArray[np.intp]) -> Floats:
            return np.asarray((self.work - self.reduced) / replicas + self.reduced)

        with np.errstate(divide="ignore", invalid="ignore"):
            least = (self.work - self.reduced) / (limit - self.reduced)
        return fewest(self.choices, np.where(costs(self.choices[:1]) <= limit, 0, least), costs, limit)


def fewest(
    choices: NDArray[np.intp], guess: Floats, costs: Callable[[NDArray[np.intp]], Floats], limit: float
) -> Floats:
    """The choice at the guess or the next one, whichever first costs at most the limit; infinite where neither does.

    A guess may be off by rounding, so it is checked against the costs themselves.
    """
    last = len(choices) - 1
    index = np.minimum(np.searchsorted(choices, guess * (1 - _ROUNDING)), last)
    index = np.minimum(index + (costs(choices[index]) > limit), last)
    return np.where(costs(choices[index]) <= limit, choices[index], np.inf)


def smallest_longest(scaling: Scaling, devices: int) -> Replicated | None:
    """The stages and replicas on at most so many devices whose longest stage is shortest; None when there are none."""
    best = _within(scaling, devices, _LARGEST)
    if best is None:
        return None
    low = 0.0
    while low < (middle := (low + best.value) / 2) < best.value:
        found = _within(scaling, devices, middle)
        best, low = (found, low) if found else (best, middle)
    return _within(scaling, devices, best.value)


def _within(scaling: Scaling, devices: int, limit: float) -> Replicated | None:
    """The stages of at most ``limit`` on the fewest devices; None when they need more than there are."""
    needed = scaling.needed(limit)
    totals, begins = _totals(np.ascontiguousarray(needed.T))
    if totals[-1] > devices:
        return None
    positions = [len(totals) - 1]
    while positions[-1]:
        positions.append(int(begins[positions[-1]]))
    ranges = [*pairwise(reversed(positions))]
    replicas = tuple(int(needed[a, b]) for a, b in ranges)
    value = max(scaling.cost(a, b, count) for (a, b), count in zip(ranges, replicas, strict=True))
    return Replicated(tuple(reversed(positions)), replicas, value)


def _totals(needed: Floats) -> tuple[Floats, Indices]:
    """The fewest devices for the pieces up to each position, and where the last stage begins; rows are its ends."""
    width = len(needed)
    totals, begins = np.zeros(width), np.zeros(width, dtype=np.intp)
    for stop in range(1, width):
        sums = totals[:stop] + needed[stop, :stop]
        begins[stop] = first = sums.argmin()
        totals[stop] = sums[first]
    return totals, begins
