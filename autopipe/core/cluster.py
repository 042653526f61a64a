"""A Cluster: the devices a plan may use and the links between them.

Ranks are numbered through ``devices`` in order. Links come in tiers, innermost first: a tier says how many
neighbouring ranks it joins, so 8 GPUs a node over NVLink and 64 in all over Ethernet are

    tiers=(Tier("NVLink", 8, Link(5e-6, 300e9)), Tier("Ethernet", 64, Link(15e-6, 12e9)))

and single pairs that differ are listed in ``pairs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from autopipe.core.errors import UsageError
from autopipe.core.units import many


@dataclass(frozen=True)
class Device:
    """``count`` equal devices. ``speed`` is relative to the device that the profile was taken on."""

    name: str
    memory_bytes: int
    count: int = 1
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"device {self.name!r}: count is {self.count}, it must be at least 1")
        if self.speed <= 0 or self.memory_bytes <= 0:
            raise UsageError(f"device {self.name!r}: speed and memory_bytes must be positive")


class Hop(NamedTuple):
    """``latency_s`` and ``bytes_per_s`` of one way between two ranks."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """One way between two ranks: ``latency_s + bytes / bytes_per_s`` a message.

    ``late_s`` is what a receiver waits that asks for a message only after it was sent, while the sender computes:
    until the sender is interrupted to hand it over. ``wires`` names what a message there, and one back, has to itself
    for its bytes / ``bytes_per_s``: links that name the same one wait for each other. Empty where none is shared.
    ``reduce_latency_s`` and ``reduce_bytes_per_s`` are what latency and rate come to when gradients are summed in a
    ring over such links, copies included; None: the same as of a message.
    """

    latency_s: float
    bytes_per_s: float
    late_s: float = 0.0
    wires: tuple[str, ...] = ()
    reduce_latency_s: float | None = None
    reduce_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.wires) not in (0, 2):
            raise UsageError(f"a link names two wires, there and back, or none, not {len(self.wires)}")
        if self.latency_s < 0 or self.late_s < 0 or self.bytes_per_s <= 0:
            raise UsageError("a link needs latency_s >= 0, late_s >= 0 and bytes_per_s > 0")
        if self.in_ring.latency_s < 0 or self.in_ring.bytes_per_s <= 0:
            raise UsageError("a link needs reduce_latency_s >= 0 and reduce_bytes_per_s > 0, or neither")

    @property
    def in_ring(self) -> Hop:
        """What a hop of a ring that sums gradients takes."""
        latency, rate = self.reduce_latency_s, self.reduce_bytes_per_s
        return Hop(self.latency_s if latency is None else latency, self.bytes_per_s if rate is None else rate)

    def transfer_s(self, size: int) -> float:
        """Seconds until ``size`` bytes have arrived; nothing to send takes no time."""
        return self.latency_s + size / self.bytes_per_s if size else 0.0


@dataclass(frozen=True)
class Tier:
    """A level of the network: groups of ``ranks`` neighbours that ``link`` joins.

    ``shared``: each group of the level below has one way out, which its ranks share, instead of one a rank.
    """

    name: str
    ranks: int
    link: Link
    shared: bool = False


@dataclass(frozen=True)
class Pair:
    """Two ranks whose link differs from their tier's, in both directions."""

    first: int
    second: int
    link: Link


@dataclass(frozen=True)
class Cluster:
    """Devices and links. ``origin`` is ``measured`` or ``declared``; ``sources`` say whose figures they are."""

    name: str
    devices: tuple[Device, ...]
    tiers: tuple[Tier, ...]
    pairs: tuple[Pair, ...] = ()
    origin: str = "declared"
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise UsageError(f"cluster {self.name!r} has no devices")
        widest = self.tiers[-1].ranks if self.tiers else 1
        if widest < len(self):
            raise UsageError(
                f"cluster {self.name!r} has {many(len(self), 'device')}, but its outermost tier joins only {widest}"
            )

    def __len__(self) -> int:
        return sum(device.count for device in self.devices)

    def ranks(self) -> Iterator[Device]:
        """One Device a rank, in rank order."""
        for device in self.devices:
            for _ in range(device.count):
                yield replace(device, count=1)

    def link(self, first: int, second: int) -> Link | None:
        """The link between two ranks; None inside one rank."""
        if first == second:
            return None
        pair = self._by_pair.get((min(first, second), max(first, second)))
        if pair is not None:
            return pair
        inner = 1
        for tier in self.tiers:
            if first // tier.ranks == second // tier.ranks:
                return _over(tier, first // inner, second // inner)
            inner = tier.ranks
        raise UsageError(
            f"cluster {self.name!r} has no link from rank {first} to {second}: there are {len(self)} ranks"
        )

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        """The links of single pairs, lower rank first; of a pair that is listed twice the first."""
        pairs = reversed(self.pairs)
        return {(min(p.first, p.second), max(p.first, p.second)): p.link for p in pairs}

    def take(self, count: int) -> Cluster:
        """The first ``count`` devices. Raises UsageError when there are fewer."""
        if count < 1 or count > len(self):
            raise UsageError(
                f"{many(count, 'device')} wanted, cluster {self.name!r} has {len(self)}: use --devices 1…{len(self)}"
            )
        kept: list[Device] = []
        for device in self.devices:
            left = count - sum(d.count for d in kept)
            if left > 0:
                kept.append(replace(device, count=min(left, device.count)))
        return replace(self, devices=tuple(kept))

    def only(self, numbers: Sequence[int]) -> Cluster:
        """The devices of these numbers, in that order; any two keep the link that they have."""
        if tuple(numbers) == tuple(range(len(numbers))):
            return self.take(len(numbers))
        ranks = list(self.ranks())
        pairs = tuple(
            Pair(a, b, link)
            for a, b in combinations(range(len(numbers)), 2)
            if (link := self.link(numbers[a], numbers[b])) is not None
        )
        return replace(self, devices=tuple(ranks[number] for number in numbers), pairs=pairs)


def _over(tier: Tier, first: int, second: int) -> Link:
    """The tier's link between two groups of the level below, with the groups' ways out where they are shared."""
    if not tier.shared:
        return tier.link
    return replace(tier.link, wires=(f"{tier.name} {first}", f"{tier.name} {second}"))
