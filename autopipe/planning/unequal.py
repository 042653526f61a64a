"""Stages on unequal numbers of devices: each shares out the rows of every micro-batch to replicas of its own.

A stage on r devices runs each micro-batch of b rows as r parts of b / r, one on each, and averages its gradients over
them. So its costs are those of b / r rows, what it sends is sent in parts, and the pipeline is one of as many ranks as
stages. For each depth, micro-batch and schedule a dynamic program over the devices (solvers.device_dp) gives the cuts
and the replicas with the least Σ + (m − 1) · max, and those with the shortest longest stage. The simulator decides, and
changes their cuts and replicas a little while the step gets shorter; where there are few ways, it looks at all. Devices
are of one kind, layers recompute all or none, and plans of this kind are not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from math import comb

import numpy as np

from autopipe.core.cluster import Cluster, Link
from autopipe.core.schedule import Kind, Schedule, Shape
from autopipe.core.stage import StageCost, stage_cost
from autopipe.core.timeline import Timeline
from autopipe.planning.best import SAME
from autopipe.planning.ladder import Floats
from autopipe.planning.moves import single_moves
from autopipe.planning.outline import Outline
from autopipe.planning.seats import ring_s, slowest
from autopipe.planning.space import Space
from autopipe.planning.tables import Tables, tables
from autopipe.simulate import simulate
from autopipe.solvers.brute import splits
from autopipe.solvers.device_dp import Option, smallest_maximum, smallest_step

MOST_DEVICES = 16
"""More are not looked at: the program's states grow with them."""

_FEW = 300
"""Up to so many cuts with replicas are all looked at."""


@dataclass(frozen=True, eq=False)
class Shared:
    """A pipeline whose stages have ``replicas`` of their own; ``bounds`` are each stage's layers."""

    space: Space
    schedule: Schedule
    micro_batch: int
    bounds: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]

    @cached_property
    def groups(self) -> tuple[range, ...]:
        """The devices of each stage, one after the other."""
        ends = [0, *accumulate(self.replicas)]
        return tuple(range(a, b) for a, b in pairwise(ends))

    @cached_property
    def recompute(self) -> tuple[tuple[int, ...], ...]:
        """The layers that recompute, of each stage: all but the last, or none."""
        last, every = len(self.space.setting.profile.layers) - 1, self.space.recompute == "all"
        return tuple(tuple(range(a, min(b, last))) if every else () for a, b in self.bounds)

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """What each device of each stage does and holds."""
        return tuple(map(self._cost, range(len(self.bounds))))

    @cached_property
    def hops(self) -> tuple[Link, ...]:
        """The links between stages, as slow as what one device sends and receives in parts takes."""
        return tuple(_hop(self.space.setting.cluster, *pair) for pair in pairwise(self.groups))

    @cached_property
    def timeline(self) -> Timeline:
        """All that happens in a step."""
        overhead_s = self.space.setting.profile.overhead_s
        return simulate(self.schedule, self.costs, self.hops, overhead_s=overhead_s)

    @cached_property
    def least_s(self) -> float:
        """Seconds that its longest stage takes by itself, and all stages for one micro-batch."""
        overhead_s, rest = self.space.setting.profile.overhead_s, self.schedule.micro_batches - 1
        works = [cost.forward_s + cost.backward_s + 2 * overhead_s for cost in self.costs]
        longest = max(
            rest * work + cost.optimizer_s + cost.reduce_s for work, cost in zip(works, self.costs, strict=True)
        )
        return max(longest + min(works), sum(works))

    @property
    def limits(self) -> tuple[int, ...]:
        """The bytes that a device of each stage may use."""
        return tuple(min(self.space.setting.limits[device] for device in group) for group in self.groups)

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return all(peak <= limit for peak, limit in zip(self.timeline.peak_bytes, self.limits, strict=True))

    @property
    def order(self) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """Among equal steps the one with the fewest devices, stages, and the first cuts."""
        return sum(self.replicas), len(self.bounds), self.bounds

    def _cost(self, stage: int) -> StageCost:
        setting, count = self.space.setting, self.replicas[stage]
        cost = stage_cost(
            setting.profile,
            *self.bounds[stage],
            self.micro_batch // count,
            speed=setting.speed(0),
            optimizer=setting.update(count),
            recompute=self.recompute[stage],
        )
        seats, (start, stop) = setting.seats(len(self.bounds)), self.bounds[stage]
        held = ((tie, sum(start <= layer < stop for layer in tie.layers)) for tie in setting.profile.ties)
        tied_s = sum(seats.tie_s(tie) for tie, often in held if 0 < often < len(tie.layers))
        ring = _ring(setting.cluster, self.groups[stage])
        passes = 1.5 if setting.sharded else 1.0
        reduce_s = passes * float(ring_s(cost.gradient_bytes, count, ring))
        return replace(cost, optimizer_s=cost.optimizer_s + tied_s, reduce_s=reduce_s)


def best_unequal(space: Space) -> Shared | None:
    """The plan with the shortest step of those whose stages have unequal numbers of replicas; None where none fits."""
    best: Shared | None = None
    for found in _found(space):
        if best is None or found.least_s <= best.timeline.step_s:
            best = found if found.fits and (best is None or _shorter(found, best)) else best
    return best and _moved(best)


def least_unequal_s(space: Space) -> float:
    """Seconds that no plan of this kind can beat: all layers' work, each in its cheapest parts, on all devices."""
    sizes = space.micro_batches
    each = [np.diagonal(space.ranges(size).work, 1) * space.ranges(size).tick_s / size for size in sizes]
    setting = space.setting
    return float(np.min(each, axis=0).sum()) * space.global_batch / len(setting.limits) / setting.speed(0)


def _shorter(one: Shared, other: Shared) -> bool:
    part = one.timeline.step_s / other.timeline.step_s
    return part < 1 - SAME or (part <= 1 + SAME and one.order < other.order)


def _found(space: Space) -> Iterator[Shared]:
    """The program's answers for every depth, micro-batch and schedule."""
    devices, sizes = len(space.setting.limits), set(space.micro_batches)
    wanted = sorted({size * count for size in sizes for count in range(1, devices)})
    for micro_batch in (size for size in wanted if space.global_batch % size == 0):
        counts = [count for count in range(1, devices) if micro_batch % count == 0 and micro_batch // count in sizes]
        for depth in (depth for depth in space.depths if 1 < depth < devices and len(counts) > 1):
            for kind in space.kinds:
                table = _table(kind, depth, space.global_batch // micro_batch)
                if table is not None and space.ranges(min(sizes)).pieces >= depth:
                    yield from _solved(space, table, micro_batch, counts)


def _table(kind: Kind, depth: int, micro_batches: int) -> Schedule | None:
    """A schedule of one stage on a rank whose backwards are whole; None where it is of another kind."""
    if kind.ahead is None or kind.executor != "torch" or kind.asynchronous:
        return None
    placement = kind.place(depth)
    if placement != tuple(range(depth)) or kind.refuses(Shape(depth, micro_batches, placement)):
        return None
    return kind.schedule(depth, micro_batches)


def _solved(space: Space, table: Schedule, micro_batch: int, counts: Sequence[int]) -> Iterator[Shared]:
    seats, cluster = space.setting.seats(table.ranks), space.setting.cluster
    pieces = space.ranges(micro_batch // counts[0]).pieces
    vectors = (
        [v for v in product(counts, repeat=table.ranks) if _unequal(v, len(space.setting.limits))]
        if table.ranks < 5
        else []
    )
    if 0 < len(vectors) * comb(pieces - 1, table.ranks - 1) <= _FEW:
        for positions in splits(pieces, table.ranks):
            yield from (each for v in vectors if _allowed(each := _made(space, table, micro_batch, positions, v)))
        return
    options, longest = list[Option](), list[Option]()
    for count in counts:
        ranges = space.ranges(micro_batch // count, count)
        made = tables(space.setting, ranges, Outline.of(table), seats, reach=ranges.pieces, may_recompute=False)
        work, after = _whole(made, made.actions[0] + made.actions[1]), _whole(made, made.optimizer)
        reduced = ring_s(ranges.gradient, count, _ring(cluster, range(count))) / ranges.tick_s
        ends = table.micro_batches * work + after + reduced
        options.append(Option(0, work * ranges.tick_s, count=count))
        longest.append(Option(0, ends * ranges.tick_s, count=count))
    available = (len(space.setting.limits),)
    hops = _hops_s(space, micro_batch, counts)
    answers = (
        smallest_step(options, available, table.micro_batches - 1, hops),
        smallest_maximum(longest, available),
    )
    for answer in answers:
        if answer is not None:
            replicas = tuple(counts[option] for option in answer.options)
            if _unequal(replicas, len(space.setting.limits)):
                yield _made(space, table, micro_batch, answer.positions, replicas)


def _unequal(replicas: Sequence[int], devices: int) -> bool:
    return len(set(replicas)) > 1 and sum(replicas) <= devices


def _made(
    space: Space, table: Schedule, micro_batch: int, positions: Sequence[int], replicas: tuple[int, ...]
) -> Shared:
    ends = space.ranges(space.micro_batches[0]).ends
    return Shared(space, table, micro_batch, tuple((ends[a], ends[b]) for a, b in pairwise(positions)), replicas)


def _whole(made: Tables, band: Floats) -> Floats:
    """A band as a table of shape (stages, n + 1, n + 1), infinite where a range is not allowed."""
    stages, width, reach = band.shape
    result = np.full((stages, width, width), np.inf)
    stops = np.arange(width)[:, None]
    starts = stops - reach + np.arange(reach)
    real = starts >= 0
    values = np.where(made.allowed, band, np.inf)
    result[:, starts[real], np.broadcast_to(stops, starts.shape)[real]] = values[:, real]
    return result


def _hops_s(space: Space, micro_batch: int, counts: Sequence[int]) -> Floats:
    """Seconds that a micro-batch and its gradient take over each cut from a stage of one count to one of another."""
    pieces = space.ranges(micro_batch // counts[0]).pieces
    seconds = np.zeros((len(counts), len(counts), pieces + 1))
    for one, before in enumerate(counts):
        ranges = space.ranges(micro_batch // before)
        for other, behind in enumerate(counts):
            if before + behind <= len(space.setting.limits):
                hop = _hop(space.setting.cluster, range(before), range(before, before + behind))
                seconds[one, other] = ranges.transfers(ranges.activations + ranges.gradients, [hop])[0] * ranges.tick_s
    return seconds


def _hop(cluster: Cluster, before: range, behind: range) -> Link:
    """The link from the devices of a stage to those of the next, for what one of the former sends of a micro-batch.

    Where the next stage has fewer each of its devices receives several parts one after the other, where it has more
    each part is sent in several messages.
    """
    links = (cluster.link(a, b) for a in before for b in behind)
    link = slowest(link for link in links if link is not None)
    fewer, more = sorted((len(before), len(behind)))
    parts = -(-more // fewer)
    return replace(link, latency_s=link.latency_s * parts, bytes_per_s=link.bytes_per_s * fewer / len(before), wires=())


def _ring(cluster: Cluster, group: range) -> Link | None:
    """The slowest link of the ring of a stage's devices."""
    pairs = zip(group, [*group[1:], group[0]], strict=True)
    links = [link for a, b in pairs if (link := cluster.link(a, b)) is not None]
    return slowest(links) if links else None


def _moved(found: Shared) -> Shared:
    """Its cuts and replicas changed a little while the step gets shorter."""
    while True:
        near = (each for each in _near(found) if _allowed(each) and each.least_s < found.timeline.step_s)
        better = next((each for each in near if each.fits and _shorter(each, found)), None)
        if better is None:
            return found
        found = better


def _near(found: Shared) -> Iterator[Shared]:
    """One cut elsewhere, or one or two stages on another number of devices."""
    space, sizes = found.space, found.space.micro_batches
    ends = space.ranges(sizes[0]).ends
    positions = [*(ends.index(start) for start, _ in found.bounds), len(ends) - 1]
    for row in single_moves(positions).tolist():
        yield _made(space, found.schedule, found.micro_batch, row, found.replicas)
    counts = [found.micro_batch // size for size in sizes if found.micro_batch % size == 0]
    stages = range(len(found.bounds))
    for changed in (pair for often in (1, 2) for pair in combinations(stages, often)):
        for taken in product(counts, repeat=len(changed)):
            other = dict(zip(changed, taken, strict=True))
            replicas = tuple(other.get(stage, own) for stage, own in enumerate(found.replicas))
            if replicas != found.replicas and _unequal(replicas, len(space.setting.limits)):
                yield _made(space, found.schedule, found.micro_batch, positions, replicas)


def _allowed(found: Shared) -> bool:
    """Whether pinned layers are on their stages."""
    pins = found.space.setting.pins.items()
    return all(found.bounds[stage][0] <= layer < found.bounds[stage][1] for layer, stage in pins)
