"""A bound with memory in it, for pipelines of all depths from one table.

What a stage of these schedules has in flight follows from how many stages come behind it. So the last stages of a deep
pipeline are those of a shallow one, and a dynamic program from the end serves every depth on the way: the least, over
all splits, of the longest way to a step's end that leads through one stage. That way is the forward of all layers
before the stage, with a hop for each stage before it; all of the stage's own work, with the least that it must
recompute; and the way back, to the first stage's optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.planning.ladder import Counts, Floats
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.recompute import Place
from autopipe.planning.seats import Seats
from autopipe.planning.tables import Setting, band, places, spots
from autopipe.solvers.chain_dp import suffix_maxima


@dataclass(frozen=True, eq=False)
class Family:
    """Pipelines of up to so many stages: where these are, and the bound of each depth in seconds, the deepest first."""

    where: tuple[Place, ...]
    bounds_s: tuple[float, ...]

    @property
    def deepest(self) -> int:
        """The stages of the deepest one."""
        return len(self.where)

    def bound_s(self, where: Sequence[Place]) -> float:
        """Seconds that a pipeline with its stages there cannot beat; 0 where it is none of the family."""
        first = self.deepest - len(where)
        if (
            first < 0
            or _as_first(self.where[first]) != _as_first(where[0])
            or self.where[first + 1 :] != tuple(where[1:])
        ):
            return 0.0
        return self.bounds_s[first]


def _as_first(place: Place) -> Place:
    """The place if its stage were the first, with nothing before it; that makes no difference to layers from 0 on."""
    return replace(place, kept=place.kept._replace(before=0))


def family(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, *, reach: int, may_recompute: bool
) -> Family:
    """The family of a schedule of whole backwards on equal devices, with stages of at most ``reach`` pieces."""
    where = places(outline, seats, shared=may_recompute)
    starts, stops, real = spots(ranges.pieces, reach)
    extra = band(ranges, where, reach, may_recompute).least_extra
    ways = np.where(real & np.isfinite(extra), _ways(setting, ranges, outline, seats, extra, starts, stops), np.inf)
    hop = _hop(setting, ranges)
    behind = np.arange(outline.stages)[::-1]
    least = suffix_maxima(ways - hop * behind[:, None, None])[:, 0] + hop * behind
    return Family(tuple(where), tuple((least * ranges.tick_s).tolist()))


def _ways(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, extra: Floats, starts: Counts, stops: Counts
) -> Floats:
    """Ticks of the longest way through a stage without hops, by stage and range; less what rounding may add up to."""
    speed, overhead = seats.fastest, round(setting.profile.overhead_s / ranges.tick_s)
    both, optimizer = ranges.forward + ranges.backward, ranges.optimizer
    own = outline.micro_batches * (np.rint((both[starts, stops] + extra) / speed) + 2 * overhead - 1)
    last = np.where(starts > 0, optimizer[0, 1], optimizer[starts, stops])
    return np.asarray(own + np.floor((both[0, starts] + last) / speed) - outline.stages)


def _hop(setting: Setting, ranges: Ranges) -> float:
    """The least ticks that a stage adds for each stage before it, besides its layers: there and back."""
    links = [tier.link for tier in setting.cluster.tiers] + [pair.link for pair in setting.cluster.pairs]
    sizes = [int(bytes_[1:-1].min()) for bytes_ in (ranges.activations, ranges.gradients) if ranges.pieces > 1]
    transfers_s = sum(min((link.transfer_s(size) for link in links), default=0.0) for size in sizes)
    return math.floor(transfers_s / ranges.tick_s) + 2 * round(setting.profile.overhead_s / ranges.tick_s) - 2
