"""Which layers keep only their inputs, so that every range of layers fits where it is placed.

A layer that recomputes costs its forward again and frees what its activations held. The layers are taken in one
order, cheapest seconds for each byte freed first, as many of a range's layers as it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planning.ranges import Floats, Layers, Ranges

Counts = NDArray[np.int64]


class Moment(NamedTuple):
    """What a stage holds while an action runs: micro-batches between F and B or I, and between I and W; whether it has
    gradients, and whether the action is the B that makes them."""

    forwards: int
    input_grads: int
    gradients: bool
    first: bool


@dataclass(frozen=True)
class Place:
    """Where a stage runs: the bytes it may use, and the moments at which it can hold most (simulate.peak_loads).

    ``buffers`` is for how many micro-batches it keeps messages, ``copies`` how many versions of its weights it has,
    ``shards`` how many ranks the optimizer's state is shared out to.
    """

    limit_bytes: int
    moments: tuple[Moment, ...]
    buffers: int
    copies: int = 1
    shards: int = 1


@dataclass(frozen=True, eq=False)
class Fit:
    """What recomputation ranges need at places, arrays of shape (places, …).

    ``taken`` is how many of ``recompute_order`` recompute: the fewest with which it fits, or those that make its peak
    smallest. ``extra`` are their forward ticks at speed 1, ``least_extra`` the fewest that any choice of layers could
    need, infinite where none can fit.
    """

    fits: NDArray[np.bool_]
    taken: Counts
    extra: Floats
    least_extra: Floats
    peak_bytes: Floats


def recompute_order(layers: Layers) -> list[int]:
    """The layers that free anything, cheapest ticks for each byte first, earlier layers first among equals."""
    useful = [i for i, freed in enumerate(layers.freed) if freed > 0]
    return sorted(useful, key=lambda i: (layers.forward[i] / layers.freed[i], i))


def fit(
    ranges: Ranges,
    starts: Counts,
    stops: Counts,
    places: Sequence[Place],
    *,
    may_recompute: bool,
    smallest: bool = False,
) -> Fit:
    """What recomputation ranges of positions need at places.

    ``starts`` and ``stops`` have shape (1, …), the same ranges at every place, or (places, …). What does not fit has
    its smallest peak only where ``smallest`` asks for it: it takes longer.
    """
    column = (len(places), *(1,) * (starts.ndim - 1))
    needs = _Needs(ranges, starts, stops, places)
    peak = needs.always(column) + needs.highest(column)
    limit = needs.limits.reshape(column)
    fits = peak <= limit
    taken, extra = np.zeros(fits.shape, dtype=np.int64), np.zeros(fits.shape)
    least = np.where(fits, 0.0, np.inf)
    if may_recompute and not fits.all():
        _climb(needs, Fit(fits, taken, extra, least, peak), smallest)
    return Fit(fits, taken, extra, least, peak)


def chosen_layers(ranges: Ranges, taken: int, start: int, stop: int) -> tuple[int, ...]:
    """The layers from ``start`` to ``stop`` (excluded) among the first ``taken`` of the order."""
    return tuple(sorted(i for i in recompute_order(ranges.layers)[:taken] if start <= i < stop))


class _Needs:
    """The bytes of ranges (arrays like ``starts``) and of places (arrays of shape (places,))."""

    def __init__(self, ranges: Ranges, starts: Counts, stops: Counts, places: Sequence[Place]) -> None:
        self.ranges, self.starts, self.stops = ranges, starts, stops
        self.held, self.left = ranges.held[starts, stops], ranges.held_after_input_grad[starts, stops]
        self.state, self.gradient = ranges.state[starts, stops], ranges.gradient[starts, stops]
        self.lasting = ranges.static[starts, stops] - self.gradient - self.state
        self.crossing, self.parameters = ranges.crossing[starts, stops], ranges.parameters[starts, stops]
        self.workspace = ranges.workspace[starts, stops]
        first = np.minimum(ranges.first_backward[starts, stops] - self.held, self.gradient + self.workspace)
        self.running = np.maximum(self.workspace, first)
        self.limits = np.array([place.limit_bytes for place in places], np.float64)
        self.buffers = np.array([place.buffers for place in places])
        self.further = np.array([place.copies - 1 for place in places])
        self.shards = np.array([place.shards for place in places])
        most = max(len(place.moments) for place in places)
        padded = [place.moments + place.moments[:1] * (most - len(place.moments)) for place in places]
        self.moments = np.array(padded, np.float64).transpose(1, 2, 0)

    def ladder(self) -> _Ladder:
        """The ladders of the ranges; those of a whole band are kept for the next pipeline."""
        with_first = bool((self.moments[:, 3] > 0).any())
        key = (self.starts.shape, with_first)
        if self.starts.ndim == 3 and key in self.ranges.ladders:
            kept: _Ladder = self.ranges.ladders[key]
            return kept
        starts, stops = self.starts.ravel(), self.stops.ravel()
        made = _Ladder.of(self.ranges, starts, np.maximum(starts, stops), with_first=with_first)
        if self.starts.ndim == 3:
            self.ranges.ladders[key] = made
        return made

    def always(self, column: tuple[int, ...]) -> Floats:
        """What is there throughout, of every range at every place."""
        buffers, further, shards = (each.reshape(column) for each in (self.buffers, self.further, self.shards))
        messages = buffers * self.crossing
        return np.asarray(self.lasting + further * self.parameters + messages + np.ceil(self.state / shards))

    def highest(self, column: tuple[int, ...]) -> Floats:
        """Activations, gradients and workspace of every range at every place when they are most."""
        return reduce(np.maximum, (self._at(moment.reshape(4, *column)) for moment in self.moments))

    def _at(self, moment: Floats) -> Floats:
        forwards, input_grads, gradients, first = moment
        held = forwards * self.held + gradients * self.gradient + np.where(first > 0, self.running, self.workspace)
        return np.asarray(held + input_grads * self.left if input_grads.any() else held)


class _Ladder(NamedTuple):
    """Ranges with more and more of their layers recomputing, arrays of shape (ranges, 1 + layers).

    ``first`` is stage.first_backward_bytes.

    ``useful`` has shape (ranges,): how many of a range's layers free anything.
    """

    freed: Floats
    extra: Floats
    workspace: Floats
    first: Floats
    taken: Counts
    useful: Counts

    @classmethod
    def of(cls, ranges: Ranges, starts: Counts, stops: Counts, *, with_first: bool) -> _Ladder:
        """The ladders of ranges of positions, arrays of shape (ranges,); ``first`` is 0 where nobody asks for it."""
        order, ends = recompute_order(ranges.layers), np.array(ranges.ends)
        number = np.full(len(ranges.layers.forward) + 1, len(order))
        number[order] = np.arange(len(order))
        first, last = ends[starts], ends[stops]
        layers = first[:, None] + np.arange(max(int((last - first).max()), 1))
        inside = np.sort(np.where(layers < last[:, None], number[np.minimum(layers, len(number) - 1)], len(order)))
        chosen = np.array([*order, -1])[inside]
        useful = inside < len(order)

        def rungs(values: Floats, join: np.ufunc) -> Floats:
            steps = np.where(useful, values[chosen], 0.0)
            return np.asarray(np.pad(join.accumulate(steps, axis=1), ((0, 0), (1, 0))))

        return cls(
            freed=rungs(ranges.layers.freed, np.add),
            extra=rungs(ranges.layers.forward, np.add),
            workspace=rungs(ranges.layers.workspace + ranges.layers.held, np.maximum),
            first=_first_backward(ranges.layers, layers, first, last, number, inside)
            if with_first
            else np.zeros((len(first), inside.shape[1] + 1)),
            taken=np.pad(np.minimum(inside + 1, len(order)), ((0, 0), (1, 0))),
            useful=useful.sum(axis=1),
        )


_CHUNK = 2_000_000
"""Numbers that are looked at together."""


def _first_backward(
    layers: Layers, inside: Counts, first: Counts, last: Counts, number: Counts, taken: Counts
) -> Floats:
    """stage.first_backward_bytes of ranges with none to all of their useful layers recomputing.

    ``inside`` are the layers from each range's ``first`` on, ``number`` each layer's place in recompute_order, and
    ``taken`` the sorted places of a range's layers.
    """
    upto = np.pad(taken, ((0, 0), (1, 0)), constant_values=-1)[:, :, None]
    result = np.empty(upto.shape[:2])
    step = max(_CHUNK // (inside.shape[1] * upto.shape[1]), 1)
    for start in range(0, len(inside), step):
        part = slice(start, start + step)
        there = (inside[part] < last[part, None])[:, None, :]
        layer = np.minimum(inside[part], len(layers.held) - 1)
        again = (number[layer][:, None, :] <= upto[part]) & (layers.freed[layer] > 0)[:, None, :]
        held, freed, made = (v[layer][:, None, :] for v in (layers.held, layers.freed, layers.gradient))
        kept = np.cumsum(np.where(there, held - freed * again, 0.0), axis=2)
        behind = np.cumsum(np.where(there, made, 0.0), axis=2)
        at_layer = kept + behind[:, :, -1:] - behind + layers.workspace[layer][:, None, :] + held * again
        result[part] = np.max(at_layer, axis=2, initial=0.0, where=there)
    return result


def _climb(needs: _Needs, found: Fit, smallest: bool) -> None:
    """Let layers recompute where a range does not fit; fills ``found`` in."""
    shape = found.fits.shape
    number = np.arange(needs.starts.size).reshape(needs.starts.shape)
    what = np.broadcast_to(number, shape)[~found.fits]
    where = np.broadcast_to(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)), shape)[~found.fits]
    items = _Items(needs, what, where)
    least, first = items.least()
    found.least_extra[~found.fits] = least
    peak, extra, taken = found.peak_bytes[~found.fits], np.zeros(len(what)), np.zeros(len(what), dtype=np.int64)
    fits = np.zeros(len(what), dtype=bool)
    for alive, rung in items.rungs(np.ones_like(first) if smallest else first, fits):
        need = items.need(alive, rung)
        better = need < peak[alive]
        at, step = alive[better], rung[better]
        peak[at] = need[better]
        extra[at], taken[at] = items.ladder.extra[what[at], step], items.ladder.taken[what[at], step]
        fits[alive] = need <= needs.limits[where[alive]]
    open_ = ~found.fits
    found.peak_bytes[open_], found.extra[open_], found.taken[open_], found.fits[open_] = peak, extra, taken, fits


class _Items:
    """Ranges at places, each pair an item: its range (a flat number) and its place."""

    def __init__(self, needs: _Needs, what: Counts, where: Counts) -> None:
        self.what, self.where = what, where
        self.ladder = needs.ladder()
        self.held, self.left = needs.held.ravel(), needs.left.ravel()
        self.workspace, self.limits = needs.workspace.ravel(), needs.limits
        self.gradient = needs.gradient.ravel()
        lasting, crossing, parameters, state = (
            each.ravel()[what] for each in (needs.lasting, needs.crossing, needs.parameters, needs.state)
        )
        further, messages = needs.further[where] * parameters, needs.buffers[where] * crossing
        self.always = lasting + further + messages + np.ceil(state / needs.shards[where])
        self.moments = needs.moments

    def need(self, items: Counts, rung: Counts) -> Floats:
        """The peak bytes of items with so many of their layers recomputing."""
        what, where = self.what[items], self.where[items]
        held = self.held[what] - self.ladder.freed[what, rung]
        gradient, left = self.gradient[what], self.left[what]
        workspace = np.maximum(self.workspace[what], self.ladder.workspace[what, rung])
        running = np.maximum(workspace, np.minimum(self.ladder.first[what, rung] - held, gradient + workspace))
        moments = (
            f[where] * held + i[where] * left + g[where] * gradient + np.where(first[where] > 0, running, workspace)
            for f, i, g, first in self.moments
        )
        return np.asarray(self.always[items] + reduce(np.maximum, moments))

    def rungs(self, first: Counts, done: NDArray[np.bool_]) -> Iterator[tuple[Counts, Counts]]:
        """Items that are not done, with one more of their layers recomputing each time, from ``first`` on."""
        rung, alive = first.copy(), np.arange(len(self.what))
        while True:
            alive = alive[(rung[alive] <= self.ladder.useful[self.what[alive]]) & ~done[alive]]
            if not len(alive):
                return
            yield alive, rung[alive]
            rung[alive] += 1

    def least(self) -> tuple[Floats, Counts]:
        """The fewest ticks with which an item can fit if recomputing needed no workspace, and the layers that takes.

        Parts of layers count; infinite where all are not enough.
        """
        missing, count = self._missing(), self.ladder.useful[self.what]
        low, high = np.zeros(len(self.what), dtype=np.int64), count + 1
        while (low < high).any():
            middle = (low + high) // 2
            enough = self.ladder.freed[self.what, np.minimum(middle, count)] >= missing
            high = np.where(enough & (low < high), middle, high)
            low = np.where(enough | (low >= high), low, middle + 1)
        rung = np.maximum(high, 1)
        top = np.minimum(rung, count)
        below = np.maximum(top - 1, 0)
        freed = [self.ladder.freed[self.what, at] for at in (below, top)]
        extra = [self.ladder.extra[self.what, at] for at in (below, top)]
        part = np.clip((missing - freed[0]) / np.maximum(freed[1] - freed[0], 1), 0, 1)  # bytes are whole
        least = np.floor(extra[0] + part * (extra[1] - extra[0]))
        return np.where(high > count, np.inf, least), rung

    def _missing(self) -> Floats:
        """The bytes of one micro-batch that must go, if recomputing needed no workspace."""
        rest = self.always + self.workspace[self.what] - self.limits[self.where]
        left, gradient = self.left[self.what], self.gradient[self.what]
        needs = np.full(len(rest), -np.inf)
        for forwards, input_grads, gradients, _ in self.moments:
            f, i, g = forwards[self.where], input_grads[self.where], gradients[self.where]
            need = self.held[self.what] + (rest + i * left + g * gradient) / np.maximum(f, 1)
            needs = np.maximum(needs, np.where(f > 0, need, -np.inf))
        return needs
