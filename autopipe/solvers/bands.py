"""Tables of ranges by their end and length, so that a pass under a threshold looks at short ranges only.

A table of chain_dp has [start, stop]. A band has [stop, c], c = 0 … k − 1 for the ranges of k … 1 pieces that end at
stop: starts ascending, so that the first smallest entry of a row has the earliest start.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def banded(costs: Floats, length: int) -> Floats:
    """A table of shape (…, n + 1, n + 1) as a band of shape (…, n + 1, length), infinite where there is no start."""
    stops = np.arange(costs.shape[-1])[:, None]
    starts = stops + np.arange(-length, 0)
    return np.where(starts >= 0, costs[..., np.maximum(starts, 0), stops], np.inf)


def least_of_lengths(costs: Floats) -> Floats:
    """The least value of the ranges of n … 1 pieces in a table of shape (…, n + 1, n + 1), shape (n,)."""
    band = banded(costs.reshape(-1, *costs.shape[-2:]).min(axis=0), costs.shape[-1] - 1)
    return np.asarray(band.min(axis=0))


def longest(least: Floats, limit: float) -> int:
    """The most pieces of a range whose value can be within the limit, at least 1; from least_of_lengths."""
    within = least <= limit
    return max(len(least) - int(within.argmax()), 1) if within.any() else 1


def before(values: Floats, length: int) -> Floats:
    """For each end, the values at the starts of a band's row: from shape (…, n + 1) to (…, n + 1, length), a view."""
    padding = np.full((*values.shape[:-1], length), np.inf)
    padded = np.concatenate([padding, values[..., :-1]], axis=-1)
    shape = (*values.shape, length)  # as sliding_window_view, which takes longer than a pass over a narrow band
    return np.ndarray(shape, padded.dtype, padded, 0, (*padded.strides, padded.strides[-1]))


def by_begin(band: Floats) -> Floats:
    """A band of one stage by where ranges begin: [start, k] has the range of k + 1 pieces, infinite beyond the end."""
    width, reach = band.shape
    padded = np.full((width + reach, reach), np.inf)
    padded[:width] = band
    down, along = padded.strides
    turned = np.ndarray((width, reach), padded.dtype, padded, down + (reach - 1) * along, (down, down - along))
    return np.ascontiguousarray(turned)


def behind(values: Floats, length: int) -> Floats:
    """For each begin the values at the ends of 1 … ``length`` pieces, infinite beyond: shape (n + 1, length)."""
    padded = np.concatenate([values[1:], np.full(length, np.inf)])
    return np.ndarray((len(values), length), padded.dtype, padded, 0, padded.strides * 2)
