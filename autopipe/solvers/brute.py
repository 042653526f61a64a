"""Every split, one after the other: what tests compare the solvers with, and the search itself where there are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from autopipe.solvers.chain_dp import Split


def splits(pieces: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut ``pieces`` into ``stages`` non-empty ranges: positions with 0 and ``pieces`` included."""
    for cuts in combinations(range(1, pieces), stages - 1):
        yield (0, *cuts, pieces)


def smallest(pieces: int, stages: int, objective: Callable[[tuple[int, ...]], float]) -> Split | None:
    """The split with the smallest objective; None when it is infinite for all."""
    best = min(
        (Split(found, objective(found)) for found in splits(pieces, stages)),
        key=lambda split: (split.value, split.positions[::-1]),
        default=None,
    )
    return best if best is not None and best.value != float("inf") else None
