"""Which layers keep only their inputs, so that every range of layers fits where it is placed.

A layer that recomputes costs its forward again and frees what its activations held. The layers are taken in one
order, cheapest seconds for each byte freed first, as many of a range's layers as it needs (see ladder).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planning.ladder import Counts, Flags, Floats
from autopipe.planning.needs import Fit, Place
from autopipe.planning.ranges import Ranges

_WHOLE = 0.5
"""Less than a byte: what divisions may be wrong by, and more."""

_AT_ONCE = 50_000
"""Items on rungs that are looked at together."""


@dataclass(frozen=True)
class Band:
    """What ranges of at most ``reach`` pieces need at several places; ``each`` may be of longer ranges, too."""

    each: Sequence[Fit]
    reach: int

    def of(self, field: Callable[[Fit], NDArray[Any]]) -> NDArray[Any]:
        """A field of all places, shape (places, pieces + 1, reach)."""
        return np.stack([field(one)[:, -self.reach :] for one in self.each])


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
    peak, limit = needs.always(column) + needs.highest(column), needs.limits.reshape(column)
    fits = peak <= limit
    taken, extra = np.zeros(fits.shape, dtype=np.int64), np.zeros(fits.shape)
    least = np.where(fits, 0.0, np.inf)
    found = Fit(fits, taken, extra, least, peak)
    open_ = ~fits if smallest else ~fits & (needs.always(column) + needs.least(column) <= limit)
    if may_recompute and open_.any():
        _climb(_Items.of(needs, open_), found, open_, smallest)
    return found


def least_extra(
    ranges: Ranges, starts: Counts, stops: Counts, places: Sequence[Place], *, may_recompute: bool
) -> Floats:
    """Fit.least_extra without the rest of it, which takes longer."""
    column = (len(places), *(1,) * (starts.ndim - 1))
    needs = _Needs(ranges, starts, stops, places)
    always, limit = needs.always(column), needs.limits.reshape(column)
    fits = always + needs.highest(column) <= limit
    least = np.where(fits, 0.0, np.inf)
    open_ = ~fits & (always + needs.least(column) <= limit)
    if may_recompute and open_.any():
        least[open_], _ = _Items.of(needs, open_).least()
    return least


def chosen_layers(ranges: Ranges, taken: int, start: int, stop: int) -> tuple[int, ...]:
    """The layers from ``start`` to ``stop`` (excluded) among the first ``taken`` of the order."""
    return tuple(sorted(i for i in ranges.ladder.order[:taken] if start <= i < stop))


class _Needs:
    """The bytes of ranges (arrays like ``starts``) and of places (arrays of shape (places,))."""

    def __init__(self, ranges: Ranges, starts: Counts, stops: Counts, places: Sequence[Place]) -> None:
        self.ranges, self.starts, self.stops = ranges, starts, stops
        self.held, self.left = ranges.held[starts, stops], ranges.held_after_input_grad[starts, stops]
        self.gradient = ranges.gradient[starts, stops]
        self.lasting = ranges.static[starts, stops] - self.gradient
        self.parameters = ranges.parameters[starts, stops]
        self.before, self.behind = ranges.activations[starts], ranges.activations[stops]
        self.workspace = ranges.workspace[starts, stops]
        first = np.minimum(ranges.first_backward[starts, stops] - self.held, self.gradient + self.workspace)
        self.running = np.maximum(self.workspace, first)
        self.limits = np.array([place.limit_bytes for place in places], np.float64)
        self.kept = np.array([place.kept for place in places], np.float64).T
        self.further = np.array([place.copies - 1 for place in places])
        most = max(len(place.moments) for place in places)
        padded = [place.moments + place.moments[:1] * (most - len(place.moments)) for place in places]
        self.moments = np.array(padded, np.float64).transpose(1, 2, 0)

    def always(self, column: tuple[int, ...]) -> Floats:
        """What is there throughout, of every range at every place."""
        further = self.further.reshape(column)
        before, behind = self.kept.reshape(2, *column)
        messages = before * self.before + behind * self.behind
        return np.asarray(self.lasting + further * self.parameters + messages)

    def highest(self, column: tuple[int, ...]) -> Floats:
        """Activations, gradients and workspace of every range at every place when they are most."""
        return reduce(np.maximum, (self._at(moment.reshape(4, *column)) for moment in self.moments))

    def least(self, column: tuple[int, ...]) -> Floats:
        """The same if all layers recomputed, in as little workspace as any needs: if that is too much none fits."""
        workspace = np.maximum(self.workspace, self.ranges.least_again[self.starts, self.stops])
        held = self.ranges.least_held[self.starts, self.stops]
        moments = (moment.reshape(4, *column) for moment in self.moments)
        least = reduce(np.maximum, (f * held + i * self.left + g * self.gradient for f, i, g, _ in moments))
        return np.asarray(workspace + least)

    def _at(self, moment: Floats) -> Floats:
        forwards, input_grads, gradients, first = moment
        held = forwards * self.held + gradients * self.gradient + np.where(first > 0, self.running, self.workspace)
        return np.asarray(held + input_grads * self.left if input_grads.any() else held)


class _Items(NamedTuple):
    """Ranges at places, an item each; arrays of shape (items,), ``moments`` of shape (moments, 4, items)."""

    ranges: Ranges
    begin: Counts
    end: Counts
    held: Floats
    left: Floats
    gradient: Floats
    workspace: Floats
    again: Floats
    always: Floats
    limit: Floats
    moments: Floats

    @classmethod
    def of(cls, needs: _Needs, which: Flags) -> _Items:
        """Those of the ranges and places that are asked for, in their order."""
        shape, ends = which.shape, np.array(needs.ranges.ends)
        where = np.broadcast_to(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)), shape)[which]

        def of_each(values: Floats) -> Floats:
            return np.broadcast_to(values, shape)[which]

        return cls(
            ranges=needs.ranges,
            begin=ends[np.broadcast_to(needs.starts, shape)[which]],
            end=ends[np.broadcast_to(needs.stops, shape)[which]],
            held=of_each(needs.held),
            left=of_each(needs.left),
            gradient=of_each(needs.gradient),
            workspace=of_each(needs.workspace),
            again=of_each(needs.ranges.least_again[needs.starts, needs.stops]),
            always=of_each(needs.always((shape[0], *(1,) * (len(shape) - 1)))),
            limit=needs.limits[where],
            moments=needs.moments[:, :, where],
        )

    def only(self, which: Counts) -> _Items:
        """Some of them."""
        arrays = {name: values[..., which] for name, values in self._asdict().items() if name != "ranges"}
        return self._replace(**arrays)

    def need(self, rung: Counts) -> Floats:
        """The peak bytes with so many of the order's layers recomputing."""
        held = self.held - self.ranges.ladder.freed_in(rung, self.begin, self.end)
        workspace = np.maximum(self.workspace, self.ranges.ladder.workspace_in(rung, self.begin, self.end))
        running = workspace
        if (self.moments[:, 3] > 0).any():
            first = self.ranges.ladder.first_backward_in(rung, self.begin, self.end) - held
            running = np.maximum(workspace, np.minimum(first, self.gradient + workspace))
        moments = (
            f * held + i * self.left + g * self.gradient + np.where(first > 0, running, workspace)
            for f, i, g, first in self.moments
        )
        return np.asarray(self.always + reduce(np.maximum, moments))

    def least(self) -> tuple[Floats, Counts]:
        """The fewest ticks with which an item that does not fit can, and the first rung of the ladder that can do.

        Infinite where all layers are not enough. No choice frees what is missing in less than the cheapest layers,
        the last one in part; nor with fewer layers than those that free most, which take as long as the quickest.
        """
        ranges, where = self.ranges, (self.begin, self.end)
        missing = self._missing(np.maximum(self.workspace, self.again))
        rung = ranges.ladder.freeing(missing, *where)
        upper = np.minimum(rung, ranges.ladder.top)
        lower = np.maximum(upper - 1, 0)
        freed = [ranges.ladder.freed_in(at, *where) for at in (lower, upper)]
        extra = [ranges.ladder.extra_in(at, *where) for at in (lower, upper)]
        part = np.clip((missing - freed[0]) / np.maximum(freed[1] - freed[0], 1), 0, 1)  # bytes are whole
        cheapest = np.floor(extra[0] + part * (extra[1] - extra[0]))
        largest = np.minimum(ranges.by_bytes.freeing(missing, *where), ranges.by_bytes.top)
        fewest = np.maximum(ranges.by_bytes.inside(largest, *where), 1)
        quickest = ranges.by_ticks.reaching(fewest, *where)
        several = ranges.by_ticks.extra_in(np.minimum(quickest, ranges.by_ticks.top), *where)
        never = (rung > ranges.ladder.top) | (quickest > ranges.by_ticks.top)
        return np.where(never, np.inf, np.maximum(cheapest, several)), rung

    def next(self, rung: Counts) -> Counts:
        """The first rung above one on which they may fit: with the workspace that it needs, and a higher one, too."""
        ladder, where = self.ranges.ladder, (self.begin, self.end)
        workspace = np.maximum(self.workspace, ladder.workspace_in(rung, *where))
        return np.maximum(ladder.above(rung, *where), ladder.freeing(self._missing(workspace) - _WHOLE, *where))

    def _missing(self, workspace: Floats) -> Floats:
        """The bytes of one micro-batch that must go, if recomputing needs that workspace at the least."""
        rest = self.always + workspace - self.limit
        needs = np.full(len(rest), -np.inf)
        for f, i, g, _ in self.moments:
            need = self.held + (rest + i * self.left + g * self.gradient) / np.maximum(f, 1)
            needs = np.maximum(needs, np.where(f > 0, need, -np.inf))
        return needs


def _climb(items: _Items, found: Fit, open_: Flags, smallest: bool) -> None:
    """Let layers recompute in the ``open_`` ranges, which do not fit; fills ``found`` in."""
    ladder = items.ranges.ladder
    found.least_extra[open_], rung = items.least()
    before = found.peak_bytes[open_]
    peak, taken, fits = _smallest(items, before) if smallest else _first(items, before, rung)
    found.extra[open_] = ladder.extra_in(taken, items.begin, items.end)
    found.peak_bytes[open_], found.taken[open_], found.fits[open_] = peak, taken, fits


def _first(items: _Items, peak: Floats, rung: Counts) -> tuple[Floats, Counts, Flags]:
    """The ``peak`` of each item on the first rung on which it fits, that rung, and whether there is one.

    Rungs on which it surely does not are left out, those below ``rung`` to begin with; where it fits on none, the
    smallest peak of those that were looked at.
    """
    ladder, taken = items.ranges.ladder, np.zeros_like(rung)
    fits = np.zeros(len(rung), dtype=bool)
    first = np.flatnonzero(rung == 0)
    rung[first] = ladder.above(np.zeros_like(first), items.begin[first], items.end[first])
    alive, left = np.arange(len(rung)), items
    while True:
        within = np.flatnonzero(rung <= ladder.top)
        alive, left, rung = alive[within], left.only(within), rung[within]
        if not len(alive):
            return peak, taken, fits
        need = left.need(rung)
        better = need < peak[alive]
        at = alive[better]
        peak[at], taken[at] = need[better], rung[better]
        fits[alive] = need <= left.limit
        rung = np.where(need <= left.limit, ladder.top + 1, left.next(rung))


def _smallest(items: _Items, peak: Floats) -> tuple[Floats, Counts, Flags]:
    """The same of all rungs, several at once: where an item fits on none, its smallest ``peak`` of all of them."""
    ladder, every = items.ranges.ladder, np.arange(len(peak))
    taken, fits = np.zeros_like(items.begin), np.zeros(len(peak), dtype=bool)
    several = max(1, _AT_ONCE // max(len(peak), 1))
    for first in range(1, ladder.top + 1, several):
        rung = np.arange(first, min(first + several, ladder.top + 1))[:, None]
        need = items.need(rung)
        within = need <= items.limit
        passed = fits | (np.logical_or.accumulate(within, axis=0) & ~within) | (np.cumsum(within, axis=0) > 1)
        need[passed | (ladder.inside(rung, items.begin, items.end) == 0)] = np.inf
        least = need.argmin(axis=0)
        better = need[least, every] < peak
        peak, taken = np.where(better, need[least, every], peak), np.where(better, first + least, taken)
        fits |= within.any(axis=0)
    return peak, taken, fits
