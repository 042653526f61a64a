"""Which layers keep only their inputs, so that every range of layers fits where it is placed.

A layer that recomputes costs its forward again and frees what its activations held. The layers are taken in one
order, cheapest seconds for each byte freed first, as many of a range's layers as it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planning.ranges import Floats, Layers, Ranges, first_backward


class Moment(NamedTuple):
    """What a stage holds while an action runs: micro-batches between F and B or I, and between I and W; whether it has
    gradients, and whether the action is the B that makes them."""

    forwards: int
    input_grads: int
    gradients: bool
    first: bool


@dataclass(frozen=True)
class Place:
    """Where a stage runs: the bytes it may use, and the moments at which it can hold most (simulate.peak_loads)."""

    limit_bytes: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True, eq=False)
class Fit:
    """For one place, of every range, arrays of shape (n + 1, n + 1).

    ``taken`` is how many of ``recompute_order`` recompute: the fewest with which it fits, or those that make its peak
    smallest. ``extra`` are their forward ticks at speed 1, ``least_extra`` the fewest that any choice of layers could
    need, infinite where none can fit.
    """

    fits: NDArray[np.bool_]
    taken: NDArray[np.int64]
    extra: Floats
    least_extra: Floats
    peak_bytes: Floats


def recompute_order(layers: Layers) -> list[int]:
    """The layers that free anything, cheapest ticks for each byte first, earlier layers first among equals."""
    useful = [i for i, freed in enumerate(layers.freed) if freed > 0]
    return sorted(useful, key=lambda i: (layers.forward[i] / layers.freed[i], i))


def fit(ranges: Ranges, place: Place, micro_batches: int, *, may_recompute: bool) -> Fit:
    """What recomputation every range needs at a place. Found once for each kind of place."""
    key = (place, micro_batches, may_recompute)
    if key not in ranges.fits:
        ranges.fits[key] = _fit(ranges, place, micro_batches, may_recompute)
    found: Fit = ranges.fits[key]
    return found


def _fit(ranges: Ranges, place: Place, micro_batches: int, may_recompute: bool) -> Fit:
    held, workspace, layers = ranges.held, ranges.workspace, ranges.layers
    kept, space = layers.held.copy(), layers.workspace.copy()
    need = _need(ranges, place, micro_batches, held, workspace, ranges.first_backward)
    missing = _missing(ranges, place, micro_batches)
    fits, peak, taken = need <= place.limit_bytes, need, np.zeros(need.shape, dtype=np.int64)
    sofar, extra, least = np.zeros((3, *need.shape))
    for count, layer in enumerate(recompute_order(layers) if may_recompute else [], 1):
        if fits.all():
            break
        inside = ranges.inside(layer)
        freed, ticks = inside * layers.freed[layer], inside * layers.forward[layer]
        least += ticks * np.clip(missing / layers.freed[layer], 0, 1)
        missing, held, sofar = missing - freed, held - freed, sofar + ticks
        kept[layer] -= layers.freed[layer]
        space[layer] += layers.held[layer]
        workspace = np.maximum(workspace, inside * space[layer])
        first = first_backward(ranges.ends, kept, space, layers.gradient)
        need = _need(ranges, place, micro_batches, held, workspace, first)
        better = ~fits & (need < peak)
        peak, taken, extra = (
            np.where(better, need, peak),
            np.where(better, count, taken),
            np.where(better, sofar, extra),
        )
        fits = fits | (need <= place.limit_bytes)
    impossible = ~fits & (missing > 0)
    return Fit(fits, taken, extra, np.where(impossible, np.inf, np.floor(least)), peak)


def chosen_layers(ranges: Ranges, taken: int, start: int, stop: int) -> tuple[int, ...]:
    """The layers from ``start`` to ``stop`` (excluded) among the first ``taken`` of the order."""
    return tuple(sorted(i for i in recompute_order(ranges.layers)[:taken] if start <= i < stop))


def _need(ranges: Ranges, place: Place, micro_batches: int, held: Floats, workspace: Floats, first: Floats) -> Floats:
    """The peak bytes of every range."""
    running = np.maximum(workspace, np.minimum(first - held, ranges.gradient + workspace))
    highest = [
        f * held + i * ranges.held_after_input_grad + g * ranges.gradient + (running if makes else workspace)
        for f, i, g, makes in place.moments
    ]
    return np.asarray(ranges.always(micro_batches) + np.max(highest, axis=0))


def _missing(ranges: Ranges, place: Place, micro_batches: int) -> Floats:
    """The bytes of one micro-batch that must go, if recomputing needed no workspace."""
    rest = ranges.always(micro_batches) + ranges.workspace - place.limit_bytes
    needs = [
        ranges.held + (rest + i * ranges.held_after_input_grad + g * ranges.gradient) / f
        for f, i, g, _ in place.moments
        if f
    ]
    return np.asarray(np.max(needs, axis=0))
