"""What ranges hold and cost with more and more of their layers recomputing: any range, any number of layers, a look-up.

Layers recompute in one order. So for the first t of it, sums over a range are differences of running sums, and maxima
over a range are the larger of two maxima over 1, 2, 4, … layers that cover it. The tables grow with the layers times
the length of the order, not with the ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Layers:
    """One number a layer: what keeping or recomputing its activations means for one micro-batch."""

    forward: Floats
    held: Floats
    freed: Floats
    workspace: Floats
    gradient: Floats

    def ordered(self, price: Floats) -> tuple[int, ...]:
        """The layers that free anything, lowest price first, earlier layers first among equals."""
        useful = np.flatnonzero(self.freed > 0)
        return tuple(useful[np.argsort(price[useful], kind="stable")].tolist())


@dataclass(frozen=True, eq=False)
class Ladder:
    """Layers of which the first t of ``order`` recompute; a rung for every t, from 0 to its length.

    A range is its first layer and the one behind its last, arrays of one shape, as is the rung of each.
    """

    layers: Layers
    order: tuple[int, ...]

    @property
    def top(self) -> int:
        """The last rung: all layers that free anything recompute."""
        return len(self.order)

    def freed_in(self, rung: Counts, begin: Counts, end: Counts) -> Floats:
        """Bytes that ranges free."""
        return np.asarray(self._freed[rung, end] - self._freed[rung, begin])

    def extra_in(self, rung: Counts, begin: Counts, end: Counts) -> Floats:
        """Ticks that their layers run again."""
        return np.asarray(self._extra[rung, end] - self._extra[rung, begin])

    def inside(self, rung: Counts, begin: Counts, end: Counts) -> Counts:
        """How many of their layers recompute."""
        return np.asarray(self._inside[rung, end] - self._inside[rung, begin])

    def workspace_in(self, rung: Counts, begin: Counts, end: Counts) -> Floats:
        """The most workspace that a layer needs to recompute; of ranges that are not empty."""
        return _largest(self._workspace, rung, begin, end)

    def first_backward_in(self, rung: Counts, begin: Counts, end: Counts) -> Floats:
        """stage.first_backward_bytes of ranges that are not empty, without regard to parameters that they tie."""
        most = _largest(self._running, rung, begin, end)
        return np.asarray(most - (self._held[begin] - self._freed[rung, begin]) + self._made[end])

    def freeing(self, missing: Floats, begin: Counts, end: Counts) -> Counts:
        """The first rung on which ranges free so many bytes; above the top where none does."""
        return self._lowest(lambda rung: self.freed_in(rung, begin, end) >= missing, begin)

    def reaching(self, count: Counts, begin: Counts, end: Counts) -> Counts:
        """The first rung on which so many of their layers recompute; above the top where there are fewer."""
        return self._lowest(lambda rung: self.inside(rung, begin, end) >= count, begin)

    def above(self, rung: Counts, begin: Counts, end: Counts) -> Counts:
        """The next rung on which one more of their layers recomputes; above the top where there is none."""
        return self.reaching(self.inside(rung, begin, end) + 1, begin, end)

    def _lowest(self, enough: Callable[[Counts], Flags], like: Counts) -> Counts:
        """The first rung at which there is enough, by halving; above the top where there never is."""
        low, high = np.zeros_like(like), np.full_like(like, self.top + 1)
        for _ in range((self.top + 1).bit_length()):
            middle = np.minimum((low + high) // 2, self.top)
            open_, here = low < high, enough(middle)
            low, high = np.where(open_ & ~here, middle + 1, low), np.where(open_ & here, middle, high)
        return high

    @cached_property
    def _again(self) -> Flags:
        """Whether a layer recomputes, shape (rungs, layers), as all that follow; sums have one more column."""
        again = np.zeros((self.top + 1, len(self.layers.forward)), dtype=bool)
        again[:, list(self.order)] = np.arange(self.top + 1)[:, None] > np.arange(self.top)
        return again

    @cached_property
    def _freed(self) -> Floats:
        return _sums(np.where(self._again, self.layers.freed, 0.0))

    @cached_property
    def _extra(self) -> Floats:
        return _sums(np.where(self._again, self.layers.forward, 0.0))

    @cached_property
    def _inside(self) -> Counts:
        return _sums(self._again).astype(np.int64)

    @cached_property
    def _held(self) -> Floats:
        return _sums(self.layers.held)

    @cached_property
    def _made(self) -> Floats:
        return _sums(self.layers.gradient)

    @cached_property
    def _workspace(self) -> Floats:
        return _maxima(np.where(self._again, self.layers.workspace + self.layers.held, 0.0))

    @cached_property
    def _running(self) -> Floats:
        """What is there when a layer of a first backward runs, if the range began at layer 0 and made no gradient."""
        kept = self._held[1:] - self._freed[:, 1:]
        return _maxima(kept - self._made[1:] + self.layers.workspace + np.where(self._again, self.layers.held, 0.0))


def _sums(values: NDArray[Any]) -> Floats:
    """Running sums along the last axis, from 0 on."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _maxima(values: Floats) -> Floats:
    """Maxima over 2^k values from each one on along the last axis, k the first one, as far as there are so many."""
    levels = [values]
    for k in range(values.shape[-1].bit_length() - 1):
        shorter, longer = levels[-1], levels[-1].copy()
        np.maximum(shorter[..., : -(1 << k)], shorter[..., 1 << k :], out=longer[..., : -(1 << k)])
        levels.append(longer)
    return np.stack(levels)


def _largest(maxima: Floats, rung: Counts, begin: Counts, end: Counts) -> Floats:
    """The largest value of each range, from those of the two parts of 2^k layers that cover it."""
    level = np.frexp(np.maximum(end - begin, 1))[1] - 1
    return np.asarray(np.maximum(maxima[level, rung, begin], maxima[level, rung, end - (1 << level)]))
