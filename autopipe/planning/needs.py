"""Where a stage runs, what ranges of layers need there, and how many forwards fit together in what is left."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from autopipe.core.in_flight import Kept
from autopipe.planning.ladder import Counts, Flags, Floats


class Moment(NamedTuple):
    """What a stage holds while an action runs: micro-batches between F and B or I, and between I and W; whether it has
    gradients, and whether the action is the B that makes them."""

    forwards: int
    input_grads: int
    gradients: bool
    first: bool


@dataclass(frozen=True)
class Place:
    """Where a stage runs: the bytes it may use, and the moments at which it can hold most (loads.peak_loads).

    ``kept`` is of how many micro-batches it keeps messages, ``copies`` how many versions of its weights it has.
    """

    limit_bytes: int
    moments: tuple[Moment, ...]
    kept: Kept
    copies: int = 1


@dataclass(frozen=True, eq=False)
class Fit:
    """What recomputation ranges need at places, arrays of shape (places, …).

    ``taken`` is how many of the ladder's order recompute: the fewest with which it fits, or those that make its peak
    smallest. ``extra`` are their forward ticks at speed 1, ``least_extra`` the fewest that any choice of layers could
    need, infinite where none can fit.
    """

    fits: Flags
    taken: Counts
    extra: Floats
    least_extra: Floats
    peak_bytes: Floats

    def at(self, place: int) -> Fit:
        """What it is at one of the places, without that axis."""
        return Fit(*(getattr(self, each.name)[place] for each in fields(self)))


def fitting_forwards(room: Floats, held: Floats, forward: Floats, micro_batches: int) -> Floats:
    """The most ticks of forwards that ``room`` bytes hold together, shape (n,).

    Of each of the parts in rows, shape (parts, n), there are as many as micro-batches; those with most ticks for their
    bytes come first, and a part of one counts (the bound of a knapsack; Dantzig, 1957).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(np.where(held > 0, -forward / held, -np.inf), axis=0, kind="stable")
    sizes, ticks = (micro_batches * np.take_along_axis(of, order, axis=0) for of in (held, forward))
    left = np.maximum(room, 0.0) - (np.cumsum(sizes, axis=0) - sizes)
    parts = np.divide(left, sizes, out=np.full_like(sizes, np.inf, dtype=np.float64), where=sizes > 0).clip(0.0, 1.0)
    return np.asarray((parts * ticks).sum(axis=0))
