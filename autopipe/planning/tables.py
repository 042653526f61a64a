"""What every range of layers costs on every stage of a pipeline: with its device, links, memory, and pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopipe.planning.ladder import Counts, Flags, Floats
from autopipe.planning.needs import Place
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.recompute import Band, fit, least_extra
from autopipe.planning.seats import Seats
from autopipe.planning.setting import Setting
from autopipe.planning.tied import in_ranges, optimizer_ticks

_TOGETHER = 16
"""Places that are looked at together: few enough for the cache."""


class Tables(NamedTuple):
    """Ticks and bytes. Cut tables have shape (stages − 1, n + 1), range tables (stages, n + 1, reach).

    They are bands (see solvers.chain_dp): only ranges of at most ``reach`` pieces are in them.
    ``actions`` are F, B, I and W, an array of shape (stages, n + 1, reach) each, overhead and recomputation included;
    ``least`` the same with the fewest ticks that recomputation could cost. ``open`` ranges are not empty, respect the
    pins and split only what may; ``allowed`` ones also fit, ``possible`` ones fit by some choice of recomputed layers.
    ``peak_bytes`` are those with the layers that recompute; ``tight`` says that some must, or some range does not fit.
    """

    actions: tuple[Floats, ...]
    least: tuple[Floats, ...]
    optimizer: Floats
    activations: Floats
    gradients: Floats
    open: Flags
    allowed: Flags
    possible: Flags
    peak_bytes: Floats
    tight: bool

    @property
    def reach(self) -> int:
        """The most pieces of a range."""
        return int(self.open.shape[-1])


def tables(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, *, reach: int, may_recompute: bool
) -> Tables:
    """The tables of a schedule for ranges of at most ``reach`` pieces.

    Several stages on a rank share its memory. Where layers may recompute each gets an equal part of it; else each is
    held against all of it, and what they need together is for Case.measured to check.
    """
    starts, stops, _ = spots(ranges.pieces, reach)
    shared = loose = band(ranges, places(outline, seats, shared=may_recompute), reach, may_recompute)
    if may_recompute and outline.stages > outline.ranks:
        loose = band(ranges, places(outline, seats, shared=False), reach, may_recompute)
    speeds = [seats.speeds[rank] for rank in outline.placement]
    hops = seats.hops(outline.placement)
    open_ = open_ranges(setting, ranges, outline, reach)
    actions = _actions(setting, ranges, shared.of(lambda fit: fit.extra), speeds, starts, stops)
    least_extra, fits = loose.of(lambda fit: fit.least_extra), shared.of(lambda fit: fit.fits)
    least = np.where(np.isfinite(least_extra), least_extra, 0)
    return Tables(
        actions=actions,
        least=_actions(setting, ranges, least, speeds, starts, stops) if may_recompute else actions,
        optimizer=_optimizer(setting, ranges, outline, seats, starts, stops),
        activations=ranges.transfers(ranges.activations, hops),
        gradients=ranges.transfers(ranges.gradients, hops),
        open=open_,
        allowed=open_ & fits,
        possible=open_ & np.isfinite(least_extra),
        peak_bytes=shared.of(lambda fit: fit.peak_bytes),
        tight=bool((open_ & (~fits | (shared.of(lambda fit: fit.taken) > 0))).any()),
    )


def spots(pieces: int, reach: int) -> tuple[Counts, Counts, Flags]:
    """Where the ranges of a band begin and end, and whether there is such a range, else an empty one.

    Of shape (pieces + 1, reach).
    """
    stops = np.arange(pieces + 1)[:, None]
    starts = stops - reach + np.arange(reach)
    real, stops = starts >= 0, np.broadcast_to(stops, starts.shape)
    return np.where(real, starts, stops), stops, real


def from_begin(pieces: int, reach: int) -> tuple[Counts, Counts, Flags]:
    """The same ranges by where they begin, from 1 piece on; those that would end too late are not there."""
    starts = np.arange(pieces + 1)[:, None]
    stops = starts + 1 + np.arange(reach)
    return np.broadcast_to(starts, stops.shape), np.minimum(stops, pieces), stops <= pieces


def places(outline: Outline, seats: Seats, *, shared: bool) -> list[Place]:
    """Where the stages run. ``shared`` gives each of several stages on a rank an equal part of its memory."""
    single = not shared or outline.stages == outline.ranks
    counts = [1 if single else outline.placement.count(rank) for rank in range(outline.ranks)]
    return [
        Place(seats.limits[rank] // counts[rank], outline.moments[stage], outline.kept[stage], outline.copies[stage])
        for stage, rank in enumerate(outline.placement)
    ]


def band(ranges: Ranges, where: Sequence[Place], reach: int, may_recompute: bool) -> Band:
    """What ranges of at most ``reach`` pieces need at places; kept, since pipelines have many places in common."""
    kept = ranges.fits[may_recompute]
    new = [place for place in dict.fromkeys(where) if place not in kept or kept[place].fits.shape[1] < reach]
    if new:
        starts, stops, _ = spots(ranges.pieces, reach)
        found = fit(ranges, starts[None], stops[None], new, may_recompute=may_recompute)
        kept.update((place, found.at(number)) for number, place in enumerate(new))
    return Band([kept[place] for place in where], reach)


def least_extras(ranges: Ranges, where: Sequence[Place], reach: int, may_recompute: bool) -> Mapping[Place, Floats]:
    """Fit.least_extra by place, and by begin and pieces of a range (see from_begin); infinite where there is none.

    Kept as ``band`` keeps it: of longer ranges only those are looked at that are not known yet.
    """
    kept = ranges.least_extras[may_recompute]
    each, narrow = dict.fromkeys(where), dict[int, list[Place]]()
    for place in each:
        if (width := kept[place].shape[1] if place in kept else 0) < reach:
            narrow.setdefault(width, []).append(place)
    for width, places_ in narrow.items():
        starts, stops, real = from_begin(ranges.pieces, reach)
        starts, stops, real = starts[:, width:], stops[:, width:], real[:, width:]
        for first in range(0, len(places_), _TOGETHER):
            some = places_[first : first + _TOGETHER]
            found = least_extra(ranges, starts[None], stops[None], some, may_recompute=may_recompute)
            for place, more in zip(some, np.where(real, found, np.inf), strict=True):
                kept[place] = np.hstack([kept[place], more]) if width else more
    return {place: kept[place][:, :reach] for place in each}


def _actions(
    setting: Setting, ranges: Ranges, extra: Floats, stage_speeds: Sequence[float], starts: Counts, stops: Counts
) -> tuple[Floats, ...]:
    """F, B, I and W; what is recomputed is part of B and I. Equal tables of all stages are one in memory."""
    overhead = round(setting.profile.overhead_s / ranges.tick_s)
    again = extra if extra.any() else extra[:1]
    one_speed = len(set(stage_speeds)) == 1
    speeds = np.array(stage_speeds[:1] if one_speed else stage_speeds)[:, None, None]

    def ticks(table: Floats, more: Floats) -> Floats:
        whole = more + table[starts, stops]
        if not (one_speed and stage_speeds[0] == 1):  # else they are whole already
            whole = np.rint(whole / speeds)
        whole = whole + overhead if overhead else whole
        return np.broadcast_to(whole, extra.shape)

    return (
        ticks(ranges.forward, np.zeros((1, 1, 1))),
        ticks(ranges.backward, again),
        ticks(ranges.input_grad, again),
        ticks(ranges.weight_grad, np.zeros((1, 1, 1))),
    )


def _optimizer(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, starts: Counts, stops: Counts
) -> Floats:
    """The optimizer, with what replicas exchange; of a tied parameter what is sure whatever the rank holds besides."""
    where = starts[None], stops[None]
    ties = in_ranges(setting.profile, ranges, outline, *where)
    return optimizer_ticks(ranges, outline, seats, *where, ties, sharded=setting.sharded)


def open_ranges(setting: Setting, ranges: Ranges, outline: Outline, reach: int) -> Flags:
    """The ranges that hold a layer, none that is pinned elsewhere, and none that must not split where the row does."""
    starts, stops, real = spots(ranges.pieces, reach)
    allowed = np.repeat((real & (starts < stops))[None], outline.stages, axis=0)
    for layer, pinned in setting.pins.items():
        elsewhere = [stage for stage, part in enumerate(outline.part_of) if part != pinned]
        allowed[elsewhere] &= ~ranges.inside(layer)[starts, stops]
    splitting = [stage for stage, row in enumerate(outline.rows) if row.splits]
    for number, each in enumerate(setting.profile.layers):
        if splitting and not each.can_split_backward:
            allowed[splitting] &= ~ranges.inside(number)[starts, stops]
    return allowed
