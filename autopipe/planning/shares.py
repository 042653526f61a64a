"""What no order, on any number of stages a rank, can beat: one rank has the model's last stage, the others the rest.

The gradient of a micro-batch begins in the last stage. Until the first micro-batch has come there, through all other
layers and all hops, the last stage's rank can only run forwards of its other stages; and every other rank can run only
forwards until a gradient has come back to it. So the last stage's rank, "the last rank", takes at the least that time,
its last stage's work, and the backwards of its other stages. Its last gradient has its way to the first stage to go,
and the weight gradients of the stages on this way come behind it. The more work the last rank's other stages have, the
longer it takes, and the less is left for the other ranks, of which one has at least its share, and at least as many
whole pieces as a pigeonhole must. The bound is the least, over where the last stage begins and how many pieces the
last rank has besides, of the largest of all these.

Memory: what a rank runs before its first gradient is held all at once. So it begins its work, as it were, no earlier
than when that gradient can come, less the forwards that fit together: of each piece as many as there are micro-batches,
those with the most work for their bytes first.

Of one stage a rank ``Case`` knows more: see bounds.least_ends_of_any_order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopipe.planning.ladder import Counts, Floats
from autopipe.planning.needs import fitting_forwards
from autopipe.planning.ranges import Ranges
from autopipe.planning.seats import Seats

_SMALL = 0.5
"""Pieces with less of the median piece's work are not counted by pigeonholes: an embedding is no block."""


def shared_bound_s(
    ranges: Ranges,
    seats: Seats,
    placement: Sequence[int],
    micro_batches: int,
    *,
    splits: bool = True,
    may_recompute: bool = False,
) -> float:
    """Seconds that no split into stages with that placement, and no order of their actions, can beat.

    Each backward is whole or, where any ``splits``, in two. 0 for a single rank.
    """
    if seats.depth == 1:
        return 0.0
    return _Shares(ranges, seats, tuple(placement), micro_batches, splits, may_recompute).least() * ranges.tick_s


@dataclass(frozen=True, eq=False)
class _Shares:
    """Ticks for each place ``begins`` where the last stage may begin, and each number of pieces of the last rank."""

    ranges: Ranges
    seats: Seats
    placement: tuple[int, ...]
    micro_batches: int
    splits: bool
    may_recompute: bool

    def least(self) -> float:
        """The bound."""
        ticks = np.maximum(np.maximum(self._way_back, self._balanced()), self._counted())
        return float(np.where(self._possible, ticks, np.inf).min(initial=np.inf))

    @cached_property
    def begins(self) -> Counts:
        """Positions at which the last stage may begin: every stage before it has a piece. A column."""
        return np.arange(len(self.placement) - 1, self.ranges.pieces)[:, None]

    @cached_property
    def _pieces(self) -> tuple[Floats, Floats, Floats]:
        """The least ticks of each piece's F, of its whole backward, and until its gradient leaves it."""
        forward, backward, input_grad, weight_grad = (
            np.diagonal(table, 1)
            for table in (self.ranges.forward, self.ranges.backward, self.ranges.input_grad, self.ranges.weight_grad)
        )
        if not self.splits:
            return forward, backward, backward
        return forward, np.minimum(backward, input_grad + weight_grad), np.minimum(backward, input_grad)

    @cached_property
    def _sums(self) -> tuple[Floats, Floats, Floats]:
        """The same of the first 0 … n pieces together."""
        forward, backward, back = (np.concatenate([[0.0], np.cumsum(ticks)]) for ticks in self._pieces)
        return forward, backward, back

    @cached_property
    def _hops(self) -> tuple[Floats, Floats]:
        """The least ticks over the first 0 … stages − 1 hops together, of activations and of gradients."""
        hops = self.seats.hops(self.placement)
        activations, gradients = (
            self.ranges.transfers(sizes, hops)[:, 1:-1].min(axis=1, initial=np.inf)
            for sizes in (self.ranges.activations, self.ranges.gradients)
        )
        return np.concatenate([[0.0], np.cumsum(activations)]), np.concatenate([[0.0], np.cumsum(gradients)])

    def _last(self, sums: Floats) -> Floats:
        """Ticks of the last stage, from sums."""
        return np.asarray(sums[-1] - sums[self.begins])

    @property
    def _rank(self) -> int:
        """The rank of the last stage."""
        return self.placement[-1]

    @cached_property
    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.seats.depth) if rank != self._rank)

    def _head(self, rank: int) -> float:
        """When a rank can begin: each stage before its first one has a piece at least."""
        first = self.placement.index(rank)
        return float(self._sums[0][first] / self.seats.fastest + self._hops[0][first])

    @cached_property
    def _arrival(self) -> Floats:
        """When the first micro-batch reaches the last stage."""
        return np.asarray(self._sums[0][self.begins] / self.seats.fastest + self._hops[0][-1])

    def _return(self, rank: int) -> Floats:
        """When the first gradient can reach a rank's deepest stage: through all stages behind it."""
        behind = self.placement[::-1].index(rank)
        back = self._sums[2][-1] - self._sums[2][self.begins - (behind - 1)]
        hops = self._hops[1][-1] - self._hops[1][len(self._hops[1]) - 1 - behind]
        there = self._sums[0][-1] / self.seats.fastest + self._hops[0][-1]
        return np.asarray(there + back / self.seats.fastest + hops)

    def _begin(self, rank: int) -> Floats:
        """When a rank begins its work at the earliest, as if it did not wait from then on; see the module."""
        first = self._arrival if rank == self._rank else self._return(rank)
        return np.maximum(self._head(rank), first - self._fitting(rank) / self.seats.speeds[rank])

    def _fitting(self, rank: int) -> float:
        """The most ticks of forwards, but for those of the last stage, that a rank can hold together."""
        held = np.diagonal(self.ranges.least_held if self.may_recompute else self.ranges.held, 1)[:-1, None]
        room = np.array([self.seats.limits[rank] - self._least_lasting])
        return float(fitting_forwards(room, held, self._pieces[0][:-1, None], self.micro_batches)[0])

    @property
    def _least_lasting(self) -> float:
        """The fewest bytes that a rank holds throughout: those of a piece, without its gradients."""
        return float(np.diagonal(self.ranges.static - self.ranges.gradient, 1).min())

    @cached_property
    def _way_back(self) -> Floats:
        """All of the last stage, until its last gradient leaves it, and the way of that to the first stage's end."""
        forward, _, back = self._sums
        own = self.micro_batches * (self._last(forward) + self._last(back)) / self.seats.speeds[self._rank]
        way = back[self.begins] / self.seats.fastest + self._hops[1][-1]
        return np.asarray(self._arrival + own + way + self._left_behind)

    @property
    def _left_behind(self) -> float:
        """What comes at the least behind the last gradient's way, over where the second stage begins.

        The first stage still has its weight gradients of that micro-batch, the more the longer it is, and its
        optimizer; the second one has those of a piece at least, from when the gradient left it.
        """
        _, backward, back = self._sums
        last = self.ranges.pieces - len(self.placement) + 1
        weights = (backward - back)[1 : last + 1]
        ticks = weights + self.ranges.optimizer[0, 1]
        if len(self.placement) > 2:
            second = np.diff(backward - back)[1 : last + 1] - back[1 : last + 1]
            ticks = np.maximum(ticks, second - self._hops[1][1] * self.seats.fastest)
        return float(ticks.min()) / self.seats.fastest

    @cached_property
    def _counts(self) -> Counts:
        """How many blocks the last rank's other stages have: a row."""
        return np.arange(1 if len(self.placement) == self.seats.depth else len(self._blocks) + 1)

    @cached_property
    def _blocks(self) -> Floats:
        """The work of all pieces but the last that are not small, ascending."""
        work = (self._pieces[0] + self._pieces[1])[:-1]
        return np.sort(work[work >= _SMALL * np.median(work)])

    @cached_property
    def _left(self) -> Counts:
        """How many blocks the other ranks have."""
        work = self._pieces[0] + self._pieces[1]
        before = np.concatenate([[0], np.cumsum(work[:-1] >= _SMALL * np.median(work[:-1]))])
        return np.asarray(before[self.begins] - self._counts)

    @property
    def _possible(self) -> Floats:
        """Whether the last rank can have so many: its other stages have a piece each, small ones too."""
        own = self.placement.count(self._rank) - 1
        small = self.ranges.pieces - 1 - len(self._blocks)
        return np.asarray((self._left >= 0) & (self._counts + small >= own))

    def _counted(self) -> Floats:
        """What the pigeonhole gives of the other ranks' blocks: of so many on a rank the least work."""
        ranks = len(self._others)
        sums = np.concatenate([[0.0], np.cumsum(self._blocks)])
        left = np.maximum(self._left, 0)
        most = -(-left // ranks)
        first = np.maximum(left - (np.maximum(most, 1) - 1) * ranks - 1, 0)
        ticks = sums[np.minimum(first + most, len(self._blocks))] - sums[first]
        fastest = max(self.seats.speeds[rank] for rank in self._others)
        begin = np.min([self._begin(rank) for rank in self._others], axis=0)
        return np.asarray(begin + self.micro_batches * ticks / fastest)

    def _balanced(self) -> Floats:
        """The least, over the work of the last rank's other stages, of its own end and the other ranks' share.

        Lines that rise with that work, and lines that fall: the least of their maximum is where two of them cross, or
        at an end of what so many blocks can take.
        """
        m, speed = self.micro_batches, self.seats.speeds[self._rank]
        forward, backward, _ = self._sums
        parts = self._pieces[1][:-1] / np.maximum(self._pieces[0][:-1] + self._pieces[1][:-1], 1)
        own = m * (self._last(forward) + self._last(backward)) / speed
        after = self.ranges.optimizer[self.begins, self.ranges.pieces] / speed
        rising = [
            (self._begin(self._rank) + own + after, m / speed),
            (self._arrival + own + after, m / speed * parts.min(initial=1.0)),
        ]
        falling = [
            self._shared([self._begin(rank) for rank in self._others], forward + backward, 1.0),
            self._shared([self._return(rank) for rank in self._others], backward, float(parts.max(initial=0.0))),
        ]
        low, high = self._range
        found = np.zeros_like(own + low)
        for start, up in rising:
            for top, down in falling:
                where = np.clip((top - start) / (up + down), low, high)
                found = np.maximum(found, np.maximum(start + up * where, top - down * where))
        return found

    def _shared(self, begins: Sequence[Floats], sums: Floats, part: float) -> tuple[Floats, float]:
        """What the other ranks take at the least where the last rank has no other stage, and what its work takes off.

        Each rank begins then, and has its share of what is left of ``sums``.
        """
        speeds = [self.seats.speeds[rank] for rank in self._others]
        waits = sum(speed * begin for speed, begin in zip(speeds, begins, strict=True))
        top = (waits + self.micro_batches * sums[self.begins]) / sum(speeds)
        return np.asarray(top), self.micro_batches * part / sum(speeds)

    @property
    def _range(self) -> tuple[Floats, Floats]:
        """The least and the most work that so many blocks can have; small pieces may come with them."""
        if len(self._counts) == 1:
            return np.zeros(1), np.zeros(1)
        sums = np.concatenate([[0.0], np.cumsum(self._blocks)])
        small = (self._pieces[0] + self._pieces[1])[:-1].sum() - sums[-1]
        return sums[self._counts], sums[-1] - sums[len(self._blocks) - self._counts] + small
