"""What crosses the boundary of a stage, for many stages of a DAG at once.

A value is made in one node and read in others. The stage that holds its maker pays for sending it where any reader is
elsewhere; a stage that holds readers but not the maker pays for receiving it; each once, however many readers there
are. Readers may also come before the maker in the order: that is a gradient, on its way back.

The price of a value for the stage between ideals I ⊂ J depends on which of its nodes I and J hold. So the sum over all
values is a product of two matrices: rows that say which nodes I holds, times prices by what J holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopipe.solvers.ideals import Family, Flags, Floats, Indices

_WORD = 62
"""So many nodes of a value fit into one whole number."""


class Value(NamedTuple):
    """A value's maker, its readers, and what a stage pays to send and to receive it."""

    maker: int
    readers: tuple[int, ...]
    sent: float
    received: float


class Traffic:
    """The prices of the stages between the ideals of a family."""

    def __init__(self, family: Family, values: Sequence[Value]) -> None:
        size = len(family)
        self._base = np.zeros(size)
        lefts: list[Flags] = []
        rights: list[Floats] = []
        for value in values:
            patterns, labels = _patterns(family.members[:, [value.maker, *value.readers]])
            prices = _prices(patterns, value)
            nothing, everything = (_row(patterns, full) for full in (False, True))
            self._base += prices[nothing, labels]
            for pattern in range(len(patterns)):
                if pattern not in (nothing, everything):
                    lefts.append(labels == pattern)
                    rights.append((prices[pattern] - prices[nothing])[labels])
        self._left = np.array(lefts, dtype=np.float64).reshape(-1, size).T.copy()
        self._right = np.array(rights, dtype=np.float64).reshape(-1, size)
        held = self._left > 0
        self._first = held.argmax(axis=0)
        self._last = size - 1 - held[::-1].argmax(axis=0)

    def prices(self, inner: Indices, outer: Indices) -> Floats:
        """What the stages pay, shape (inner, outer); only where the inner ideal is contained is it meaningful."""
        asked = np.flatnonzero((self._first <= inner[-1]) & (self._last >= inner[0]))
        crossing = self._left[np.ix_(inner, asked)] @ self._right[np.ix_(asked, outer)]
        return np.asarray(crossing + self._base[outer])


def _patterns(held: Flags) -> tuple[Flags, Indices]:
    """The different rows of a matrix of flags, and the number of each row's."""
    if held.shape[1] <= _WORD:
        codes = held @ (1 << np.arange(held.shape[1], dtype=np.int64))
        _, first, labels = np.unique(codes, return_index=True, return_inverse=True)
        return held[first], labels
    patterns, labels = np.unique(held, axis=0, return_inverse=True)
    return patterns, labels.reshape(-1)


def _row(patterns: Flags, full: bool) -> int:
    """The pattern that holds all nodes or none: those of the empty set and of all nodes are always there."""
    return int(np.flatnonzero((patterns == full).all(axis=1))[0])


def _prices(patterns: Flags, value: Value) -> Floats:
    """What a stage pays between an ideal that holds one pattern and one that holds another."""
    inner, outer = patterns[:, None, :], patterns[None, :, :]
    inside = outer & ~inner
    sends = inside[..., 0] & ~inside[..., 1:].all(axis=-1)
    receives = ~inside[..., 0] & inside[..., 1:].any(axis=-1)
    return value.sent * sends + value.received * receives
