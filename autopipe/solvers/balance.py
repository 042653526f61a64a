"""Equal stages, at any size: the smallest longest stage of a chain whose work adds up.

For a threshold z it is enough to fill stages one after the other with as much as z allows, so each question costs a
binary search a stage, and the answer a halving of the interval: microseconds where chain_dp's passes take
milliseconds. Exact, but only where stages are equal and a part of a stage never costs more than the whole: no
transfers, no memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from autopipe.solvers.chain_dp import Split


def smallest_longest(work: Sequence[float], stages: int) -> Split | None:
    """The split of pieces with this ``work`` whose longest stage is shortest; None where there are fewer pieces.

    Among equal values the last stage holds as many pieces as it can, then the one before it.

    >>> smallest_longest([3, 1, 1, 1, 3], 3)
    Split(positions=(0, 1, 4, 5), value=3.0)
    """
    if not 1 <= stages <= len(work):
        return None
    sums = [0.0, *accumulate(map(float, work))]
    high, low = sums[-1], max(map(float, work))
    while low < high:
        middle = (low + high) / 2
        found, later = _filled(sums, stages, middle if middle < high else low)
        high, low = (_longest(sums, found), low) if found else (high, later)
    found, _ = _filled(sums, stages, high)
    return Split(tuple(found), high) if found else None


def _longest(sums: Sequence[float], positions: Sequence[int]) -> float:
    return max(sums[b] - sums[a] for a, b in pairwise(positions))


def _filled(sums: Sequence[float], stages: int, limit: float) -> tuple[list[int] | None, float]:
    """Stages of at most ``limit``, filled from the last one backwards, None where so many do not hold all pieces.

    Also the least limit above this one with which any stage could hold more.
    """
    positions, later = [len(sums) - 1], sums[-1]
    for before in reversed(range(stages)):
        stop = positions[-1]
        start = bisect_left(sums, sums[stop] - limit, before, stop)
        while start > before and sums[stop] - sums[start - 1] <= limit:
            start -= 1
        while sums[stop] - sums[start] > limit:
            start += 1
        if start == stop:
            return None, later
        if start > before:
            later = min(later, sums[stop] - sums[start - 1])
        positions.append(start)
    return (positions[::-1] if positions[-1] == 0 else None), later
