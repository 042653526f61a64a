"""A bound with memory in it, for pipelines of all depths from one table.

What a stage of these schedules has in flight follows from how many stages come behind it. So the last stages of a deep
pipeline are those of a shallow one, and a dynamic program from the end serves every depth on the way: the least, over
all splits, of the longest way to a step's end that leads through one stage. That way is the forward of all layers
before the stage, with a hop for each stage before it; all of the stage's own work, with the least that it must
recompute; and the way back, with the least that the stages before it must, to the first stage's optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.core.cluster import Link
from autopipe.core.in_flight import in_turn
from autopipe.planning.bounds import ends_behind
from autopipe.planning.ladder import Floats
from autopipe.planning.needs import Place
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.seats import Seats
from autopipe.planning.setting import Setting
from autopipe.planning.tables import from_begin, least_extras, places, spots, tables
from autopipe.solvers.bands import behind, by_begin


@dataclass(frozen=True, eq=False)
class Family:
    """Pipelines of up to so many stages: the forwards that come ``ahead`` in each stage of the deepest one, and the
    bound of each depth in seconds, the deepest first. ``after`` are the ticks from which a deeper one goes on."""

    ahead: tuple[int, ...]
    bounds_s: tuple[float, ...]
    after: Floats

    @property
    def deepest(self) -> int:
        """The stages of the deepest one."""
        return len(self.ahead)

    def bound_s(self, ahead: tuple[int, ...]) -> float:
        """Seconds that a pipeline with so many forwards ahead cannot beat; 0 where it is none of the family."""
        first = self.deepest - len(ahead)
        return self.bounds_s[first] if first >= 0 and self.ahead[first:] == ahead else 0.0


def family(
    setting: Setting,
    ranges: Ranges,
    outline: Outline,
    seats: Seats,
    *,
    reach: int,
    may_recompute: bool,
    shallower: Family | None = None,
) -> Family:
    """The family of a schedule of whole backwards on equal devices, with stages of at most ``reach`` pieces.

    Where a ``shallower`` one of the same is known only the stages before its first one are looked at.
    """
    known = shallower if shallower and outline.ahead[-shallower.deepest :] == shallower.ahead else None
    where = _behind_others(places(outline, seats, shared=may_recompute), outline)
    where = where[: outline.stages - (known.deepest if known else 0)]
    extra = least_extras(ranges, where, reach, may_recompute)
    stages = _stages(setting, ranges, outline, seats, [extra[place] for place in where])
    return _of(ranges, outline, stages, sum(_hops(setting, ranges)), rounded=1, known=known)


def _behind_others(where: Sequence[Place], outline: Outline) -> list[Place]:
    """The places, the first one as if stages came before it: that is the same for what begins with the model."""
    kept = in_turn((outline.ahead[0], *outline.ahead), outline.micro_batches)[1]
    return [replace(where[0], kept=kept), *where[1:]]


def sharp_family(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, *, reach: int, may_recompute: bool
) -> Family:
    """The same with all that bounds.least_ends knows of a stage: its round trips, and what its gradients' sums take.

    It takes longer. Links and rings are the fastest that there are, since they differ with the depth.
    """
    free = replace(setting, pins={})  # which number stages from the first one
    costs = tables(free, ranges, outline, seats, reach=reach, may_recompute=may_recompute)
    links, count = _links(setting), outline.stages
    forth, back = (
        np.tile(_transfers(ranges, sizes, links), (count - 1, 1)) for sizes in (ranges.activations, ranges.gradients)
    )
    starts, stops, _ = spots(ranges.pieces, reach)
    sums = np.rint(seats.least_ring_s(ranges.gradient[starts, stops]) / ranges.tick_s)
    least = np.minimum(costs.optimizer, np.rint(ranges.optimizer[starts, stops] / seats.fastest) + sums)
    speed, (hop, _) = seats.fastest, _hops(setting, ranges)
    tail = np.floor((ranges.backward[0, starts] + ranges.optimizer[0, 1]) / speed) - count
    ends = ends_behind(costs._replace(activations=forth, gradients=back, optimizer=least), outline.rows, tail)
    ways = np.where(costs.possible, ends + np.floor(ranges.forward[0, starts] / speed) - count, np.inf)
    overhead = round(setting.profile.overhead_s / ranges.tick_s)
    again = np.maximum(costs.least[1] - np.ceil(ranges.backward[starts, stops] / speed) - overhead, 0)
    return _of(ranges, outline, zip(map(by_begin, ways[::-1]), map(by_begin, again[::-1]), strict=True), hop)


def _of(
    ranges: Ranges,
    outline: Outline,
    stages: Iterable[tuple[Floats, Floats]],
    hop: float,
    *,
    rounded: int = 0,
    known: Family | None = None,
) -> Family:
    """The family whose stages, the last one first, have such ways through them, and recompute so much at the least.

    Both are by the position where a stage begins and its pieces, 1 and more. The least of a split is the smallest
    maximum from its end on, with what a stage adds to the ways through those behind it, a ``hop`` and what it
    recomputes, on what comes after instead of on each of them. ``rounded`` ticks may be too many for each stage of a
    pipeline. What is ``known`` are the last stages.
    """
    after, least = np.full(ranges.pieces + 1, np.inf), list[float]()
    after[-1] = np.finfo(np.float64).min  # and not −∞, which has no sum with ∞
    if known:
        after, least = known.after, [*reversed(known.bounds_s)]
    for depth, (way, again) in enumerate(stages, len(least) + 1):
        after = np.maximum(way, behind(after + hop, way.shape[1]) + again).min(axis=1)
        least.append((float(after[0]) - rounded * depth) * ranges.tick_s)
    return Family(outline.ahead, tuple(reversed(least)), after)


def _stages(
    setting: Setting, ranges: Ranges, outline: Outline, seats: Seats, extras: Sequence[Floats]
) -> Iterator[tuple[Floats, Floats]]:
    """Ticks of the longest way through a stage without hops, and of what it recomputes, the last one first; see _of.

    Less what rounding may add in the stage itself. Neighbours with one table of what they recompute have equal ways.
    """
    speed, overhead = seats.fastest, round(setting.profile.overhead_s / ranges.tick_s)
    starts, stops, _ = from_begin(ranges.pieces, extras[0].shape[1])
    both, optimizer = ranges.forward + ranges.backward, ranges.optimizer
    last = np.where(starts > 0, optimizer[0, 1], optimizer[starts, stops])
    there, work = np.floor((both[0, starts] + last) / speed), both[starts, stops]
    same, way, again = None, work, work
    for extra in reversed(extras):
        if extra is not same:
            same, way, again = extra, work + extra, np.floor(extra / speed)
            way = np.rint(np.divide(way, speed, out=way), out=way)
            way += 2 * overhead - 1
            way *= outline.micro_batches
            way += there
        yield way, again


def _links(setting: Setting) -> list[Link]:
    return [tier.link for tier in setting.cluster.tiers] + [pair.link for pair in setting.cluster.pairs]


def _transfers(ranges: Ranges, sizes: Floats, links: Sequence[Link]) -> Floats:
    """The least ticks over a hop at each cut."""
    return ranges.transfers(sizes, links).min(axis=0) if links else np.zeros(len(sizes))


def _hops(setting: Setting, ranges: Ranges) -> tuple[float, float]:
    """The least ticks that a stage adds for each stage before it, besides its layers: there, and back."""
    links, overhead = _links(setting), round(setting.profile.overhead_s / ranges.tick_s)
    inside = slice(1, -1) if ranges.pieces > 1 else slice(0)
    there, back = (
        float(_transfers(ranges, sizes, links)[inside].min(initial=np.inf))
        for sizes in (ranges.activations, ranges.gradients)
    )
    return (there + overhead - 1, back + overhead - 1) if ranges.pieces > 1 else (0.0, 0.0)
