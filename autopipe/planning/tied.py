"""Tied parameters in a search: a rank holds one for all of its stages, and steps it once.

It is counted with the last of the rank's stages that read it (see core.stage.shared_ties), by stage and split at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopipe.core.optimizer import Optimizer
from autopipe.core.profile import Profile, Tie
from autopipe.core.schedule import stages_on
from autopipe.core.stage import tied_state_bytes
from autopipe.planning.ladder import Counts, Flags, Floats
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.seats import Seats


class Tied(NamedTuple):
    """One tied parameter: with which stages it is not counted, since a later one of their rank reads it too, and
    before whose optimizer step its gradient is summed over ranks; arrays of shape (stages, …)."""

    tie: Tie
    shared: Flags
    summed: Flags


def in_splits(profile: Profile, ranges: Ranges, outline: Outline, begin: Counts, end: Counts) -> list[Tied]:
    """The profile's ties where stages take the ranges between two positions, of shape (stages, splits)."""
    return [_in_splits(tie, ranges.reads(tie)[begin, end], outline) for tie in profile.ties]


def _in_splits(tie: Tie, reads: Flags, outline: Outline) -> Tied:
    shared = np.zeros_like(reads)
    ranks = np.zeros(reads.shape[1], np.intp)
    for rank in range(outline.ranks):
        own = list(stages_on(outline.placement, rank))
        left = np.cumsum(reads[own][::-1], axis=0)[::-1]  # this stage and later ones that read it
        shared[own] = reads[own] & (left > 1)
        ranks += left[0] > 0
    several = ranks > outline.ways  # the two ranks of a part sum all of its gradients anyway
    return Tied(tie, shared, reads & ~shared & several & tie.trained)


def in_ranges(profile: Profile, ranges: Ranges, outline: Outline, begin: Counts, end: Counts) -> list[Tied]:
    """The same of a stage whose rank's other stages are not known: what is counted at the least. Shape (1, …)."""
    alone = outline.stages == outline.ranks
    parts = [(tie, ranges.part_of(tie)[begin, end] > 0) for tie in profile.ties]
    return [Tied(tie, part & (not alone), part & alone & tie.trained) for tie, part in parts]


def optimizer_ticks(
    ranges: Ranges, outline: Outline, seats: Seats, begin: Counts, end: Counts, ties: Sequence[Tied], *, sharded: bool
) -> Floats:
    """Ticks of the optimizer, with what replicas exchange, and the sums of gradients that another rank holds too.

    ``begin`` and ``end`` are positions of shape (stages, …), or (1, …) for the same ranges on all stages.
    """
    speeds = np.array([seats.speeds[rank] for rank in outline.placement]).reshape(-1, *(1,) * (begin.ndim - 1))
    own, sizes = ranges.optimizer[begin, end], ranges.gradient[begin, end]
    for tie, shared, _ in ties:
        if tie.trained:
            own, sizes = own - ranges.tied_ticks[tie] * shared, sizes - tie.bytes * shared
    ticks = np.rint(own / speeds)
    if seats.replicas * outline.ways > 1:
        for row, size, rank in zip(ticks, np.broadcast_to(sizes, ticks.shape), outline.placement, strict=True):
            row += np.rint(seats.exchanges_s(rank, size, outline.ways, sharded=sharded) / ranges.tick_s)
    for tie, _, summed in ties:
        ticks = ticks + np.rint(seats.tie_s(tie) / ranges.tick_s) * summed
    return np.asarray(ticks)


class Twice(NamedTuple):
    """Bytes that the sum over a rank's stages counts too often, by stage: what lasts, and gradients."""

    lasting: Floats
    gradient: Floats


def twice(ties: Sequence[Tied], profile: Profile, update: Optimizer, shape: tuple[int, ...]) -> Twice:
    """What is counted with a later stage of the rank, by stage and split."""
    lasting, gradient = np.zeros((2, *shape))
    for tie, shared, _ in ties:
        lasting += shared * (tie.bytes + tied_state_bytes(update, profile, tie))
        gradient += shared * (tie.bytes if tie.trained else 0)
    return Twice(lasting, gradient)
