"""Exact minima of sum + repeats · maximum, by searching the threshold on the maximum.

The least sum with every stage's work ≤ z never grows with z. So of two thresholds low < high, none between them can
beat sum(high) + repeats · low, and halving the interval where that still beats the best ends after a few passes, with
the exact optimum. What a solution is, and how the least sum under a threshold is found, is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Solution(Protocol):
    """An answer with the sum of its stages and the work of its longest one; ``order`` decides between equals."""

    @property
    def total(self) -> float:
        """The sum."""

    @property
    def maximum(self) -> float:
        """The most work of a stage."""

    @property
    def order(self) -> Any:
        """What is smaller for the better of two equal answers."""


S = TypeVar("S", bound=Solution)


class Best(NamedTuple, Generic[S]):
    """The best solution and its value."""

    solution: S
    value: float


def smallest(solve: Callable[[float], S | None], work: Floats, least: float, repeats: int) -> Best[S] | None:
    """The solution with the smallest total + repeats · maximum; None when there is none.

    ``solve(z)`` gives the least total with every stage's work ≤ z, ``work`` holds all works that there are, and
    ``least`` is the smallest maximum.
    """
    loosest = solve(np.inf)
    if loosest is None:
        return None
    search = _Search(solve, repeats, Best(loosest, _value(loosest, repeats)))
    search.solved(least)  # a good one to begin with, often the best
    levels = np.unique(work[(work > least) & (work <= loosest.maximum)])
    search.halve(levels, 0, len(levels) - 1, loosest.total)
    return search.best


def _value(solution: Solution, repeats: int) -> float:
    return solution.total + repeats * solution.maximum


class _Search(Generic[S]):
    """The best solution seen so far, and the search for a better one."""

    def __init__(self, solve: Callable[[float], S | None], repeats: int, best: Best[S]) -> None:
        self.solve, self.repeats, self.best = solve, repeats, best

    def halve(self, levels: Floats, low: int, high: int, total: float) -> None:
        """Search thresholds ``levels[low:high]``; ``total`` is the sum at ``levels[high]``."""
        useful = np.searchsorted(total + self.repeats * levels[low:high], self.best.value, side="right")
        if not useful:
            return
        middle = low + int(useful) // 2
        solved = self.solved(float(levels[middle]))
        self.halve(levels, middle + 1, high, total)
        if solved is not None:
            self.halve(levels, low, int(np.searchsorted(levels, solved.maximum)), solved.total)

    def solved(self, threshold: float) -> S | None:
        """The least sum under a threshold; it is kept when it is the best."""
        found = self.solve(threshold)
        if found is not None:
            candidate = Best(found, _value(found, self.repeats))
            self.best = min(self.best, candidate, key=lambda best: (best.value, best.solution.order))
        return found
