"""Which devices are the ranks of a pipeline, when several replicas of it run side by side.

Replica k's rank r is global rank k · depth + r, as the runtime numbers them. All replicas wait for each other at the
end of a step, so a stage is as slow as the slowest of its replicas and may use what the smallest of them has, and a
hop between two stages, or a ring of a stage's replicas, is as slow as the slowest link in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Cluster, Link
from autopipe.core.profile import Tie

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


def slowest(links: Iterable[Link]) -> Link:
    """A link that is in no respect faster than any of these; its wires are the first one's."""
    found = list(links)
    latency, rate, late = zip(*((link.latency_s, link.bytes_per_s, link.late_s) for link in found), strict=True)
    made = Link(max(latency), min(rate), max(late), found[0].wires)
    ring_latency, ring_rate = zip(*(link.in_ring for link in found), strict=True)
    if (max(ring_latency), min(ring_rate)) == made.in_ring:
        return made
    return replace(made, reduce_latency_s=max(ring_latency), reduce_bytes_per_s=min(ring_rate))


def ring_s(sizes: Floats | float, ranks: int, link: Link | None) -> Floats:
    """Seconds to sum so many bytes over a ring: 2 (ranks − 1) messages, each of one rank's part of the bytes."""
    if link is None or ranks < 2:
        return np.zeros(np.shape(sizes))
    hop = link.in_ring
    seconds = 2 * (ranks - 1) * (hop.latency_s + np.asarray(sizes) / ranks / hop.bytes_per_s)
    return np.where(np.asarray(sizes) > 0, seconds, 0.0)


@dataclass(frozen=True, eq=False)
class Devices:
    """The speeds and the usable bytes of all global ranks; ``speed`` and ``limit`` where they are the same for all."""

    speeds: Floats
    limits: Numbers
    speed: float | None
    limit: int | None

    @classmethod
    def of(cls, cluster: Cluster, limits: Sequence[int]) -> Devices:
        """The devices of a cluster."""
        speeds = [device.speed for device in cluster.devices for _ in range(device.count)]
        one_speed, one_limit = len(set(speeds)) == 1, len(set(limits)) == 1
        return cls(
            np.array(speeds), np.array(limits), speeds[0] if one_speed else None, limits[0] if one_limit else None
        )


@dataclass(frozen=True, eq=False)
class Seats:
    """The ranks of one pipeline of ``depth`` that runs ``replicas`` times.

    ``order`` lists the cluster's devices as the pipeline passes them, where that is not theirs; for one replica.
    """

    cluster: Cluster
    devices: Devices
    depth: int
    replicas: int
    order: tuple[int, ...] = ()

    @cached_property
    def numbers(self) -> Numbers:
        """The devices by their numbers in the cluster, shape (replicas, depth)."""
        count = self.replicas * self.depth
        taken = np.array(self.order[:count], np.int64) if self.order else np.arange(count)
        return taken.reshape(self.replicas, self.depth)

    @cached_property
    def used(self) -> tuple[int, ...]:
        """The devices that are used, ascending: the processes that run are numbered through them."""
        return tuple(sorted(self.numbers.ravel().tolist()))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """For each rank of one pipeline in the order of its stages its number where it runs."""
        place = {device: number for number, device in enumerate(self.used)}
        return tuple(place[device] for device in self.numbers[0].tolist()) if self.order else tuple(range(self.depth))

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each rank."""
        if self.devices.speed is not None:
            return (self.devices.speed,) * self.depth
        return tuple(self.devices.speeds[self.numbers].min(axis=0).tolist())

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """The bytes that each rank may use."""
        if self.devices.limit is not None:
            return (self.devices.limit,) * self.depth
        return tuple(self.devices.limits[self.numbers].min(axis=0).tolist())

    @cached_property
    def fastest(self) -> float:
        """The speed of the fastest rank."""
        if self.devices.speed is not None:
            return self.devices.speed
        return max(self.speeds)

    @cached_property
    def total_speed(self) -> float:
        """The speeds of all ranks together."""
        return sum(self.speeds)

    @cached_property
    def room(self) -> int:
        """The bytes that all ranks together may use."""
        if self.devices.limit is not None:
            return self.devices.limit * self.depth
        return sum(self.limits)

    def product(self, part: float) -> float:
        """The product of 1 − part · speed / fastest speed over all ranks."""
        if self.devices.speed is not None:
            return float((1 - part) ** self.depth)
        return math.prod(1 - part * speed / self.fastest for speed in self.speeds)

    def least_reduce_s(self, size: float) -> float:
        """Seconds that all ranks together take at the least to sum so many bytes over their replicas.

        The first and the last replica's rank are (replicas − 1) · depth apart, so some link of a ring is of a tier
        that joins as many.
        """
        return 2 * (self.replicas - 1) / self.replicas * size / self._best_rate((self.replicas - 1) * self.depth)

    def least_ring_s(self, sizes: Floats) -> Floats:
        """Seconds that a rank takes at the least to sum so many bytes, with as many replicas of any depth."""
        return 2 * (self.replicas - 1) / self.replicas * sizes / self._best_rate(self.replicas - 1)

    def _best_rate(self, span: int) -> float:
        """The most bytes a second over a link that two ranks so far apart can have."""
        wide = [tier.link for tier in self.cluster.tiers if tier.ranks > span]
        single = [pair.link for pair in self.cluster.pairs]
        return max((link.in_ring.bytes_per_s for link in (*wide, *single)), default=math.inf)

    def hops(self, placement: Sequence[int]) -> tuple[Link | None, ...]:
        """The links between neighbouring stages, None inside a rank."""
        pairs = [(a, b) for a, b in pairwise(placement) if a != b]
        found = iter(
            self._slowest(*(self.numbers[:, [pair[end] for pair in pairs]] for end in (0, 1))) if pairs else ()
        )
        return tuple(None if a == b else next(found) for a, b in pairwise(placement))

    @cached_property
    def rings(self) -> tuple[Link | None, ...]:
        """For each rank the slowest link of the ring of its replicas, None without replicas."""
        if self.replicas == 1:
            return (None,) * self.depth
        return tuple(self._slowest(self.numbers, np.roll(self.numbers, -1, axis=0)))

    @cached_property
    def two_way_rings(self) -> tuple[Link | None, ...]:
        """The same in a two-way pipeline, where the rank at the other end holds the same parts of the model."""
        members = np.vstack([self.numbers, self.numbers[:, ::-1]])
        return tuple(self._slowest(members, np.roll(members, -1, axis=0)))

    def tie_s(self, tie: Tie) -> float:
        """Seconds to sum a tied parameter's gradient over its ranks: a ring over the slowest link of the pipeline."""
        return float(ring_s(tie.bytes, min(len(tie.layers), self.depth), self._widest))

    def exchanges_s(self, rank: int, sizes: Floats | float, ways: int = 1, *, sharded: bool = False) -> Floats:
        """Seconds that a rank's replicas need to sum so many bytes of gradients, those of both ways of each.

        ``sharded`` replicas that update a part of the parameters each also hand these round: half of a ring.
        """
        rings = self.two_way_rings if ways == 2 else self.rings
        summed = ring_s(sizes, self.replicas * ways, rings[rank])
        return summed + ring_s(sizes, self.replicas, self.rings[rank]) / 2 if sharded else summed

    @cached_property
    def _widest(self) -> Link | None:
        first, second = np.triu_indices(self.depth, 1)
        if not len(first):
            return None
        return slowest(self._slowest(self.numbers[:, first], self.numbers[:, second]))

    def _slowest(self, first: Numbers, second: Numbers) -> list[Link]:
        """For each column the slowest link between first and second of its rows."""
        tiers = np.zeros(first.shape, dtype=np.int64)
        for number, tier in reversed([*enumerate(self.cluster.tiers)]):
            tiers[first // tier.ranks == second // tier.ranks] = number
        masks = np.bitwise_or.reduce(1 << tiers, axis=0)
        by_mask = {
            mask: slowest(tier.link for number, tier in enumerate(self.cluster.tiers) if mask >> number & 1)
            for mask in set(masks.tolist())
        }
        if not self.cluster.pairs and not any(tier.shared for tier in self.cluster.tiers):
            return [by_mask[mask] for mask in masks.tolist()]
        columns = zip(first.T.tolist(), second.T.tolist(), strict=True)
        links = [[self.cluster.link(a, b) for a, b in zip(*column, strict=True)] for column in columns]
        return [slowest(link for link in column if link) for column in links]
