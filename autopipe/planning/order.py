"""Which device is which rank of a pipeline: the order in which its stages pass the devices of a cluster.

Where devices or links differ it decides which device holds most, and which links the wide cuts cross. Devices that are
alike in speed, memory and all their links change places without any effect, so only one of such orders is looked at.
Where few are left, each is searched in full, with what has been reached as the limit; else the best plan's own case is
looked at in the orders that swapping two devices leads to, while its step gets shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice

from autopipe.core.cluster import Link, Tier
from autopipe.planning.best import SAME, Answer, glance, search
from autopipe.planning.remaking import Choice
from autopipe.planning.setting import Setting
from autopipe.planning.space import Space

_ALL = 120
"""Up to so many orders are all looked at."""

_TRIED = 60
"""Of more orders so many are, fewer where they have many actions."""

_EFFORT = 500_000
"""Actions of all of them together."""

_DEVICES = 64
"""On more devices the order is the cluster's."""

_WORTH = 1e-3
"""Equal devices are not moved where the fastest link between any two would not make the step so much shorter."""

Order = tuple[int, ...]


def placed(space: Space, answer: Answer) -> tuple[Space, Answer]:
    """The best order of the devices for one pipeline, and its answer.

    ``answer`` is that of the cluster's own order, which is left for a shorter step only. The bound is that of all
    orders that were looked at.
    """
    kinds = tuple(kind for kind in space.kinds if kind.executor == "torch")
    if 1 not in space.replicas or not kinds or not 1 < len(space.setting.limits) <= _DEVICES:
        return space, answer
    alone = replace(space, kinds=kinds, replicas=(1,))
    if not _differ(space.setting) or (space.setting.equal and not _worth(alone, answer)):
        return space, answer
    orders = [*islice(distinct_orders(space.setting, min(max(space.depths), len(space.setting.limits))), _ALL + 1)]
    if len(orders) > _ALL:
        return _climbed(space, alone, answer)
    return _best(space, alone, answer, orders)


def distinct_orders(setting: Setting, depth: int) -> Iterator[Order]:
    """The orders of all devices whose first ``depth`` differ by more than places of devices that are alike."""
    seen, classes = set[tuple[object, ...]](), _classes(setting)

    def further(taken: Order) -> Iterator[Order]:
        if len(taken) == depth:
            yield taken
            return
        first: dict[int, int] = {}
        for device, kind in enumerate(classes):
            if device not in taken:
                first.setdefault(kind, device)
        for device in first.values():
            yield from further((*taken, device))

    for taken in further(()):
        alike = _pattern(setting, taken)
        if alike not in seen:
            seen.add(alike)
            yield *taken, *(device for device in range(len(classes)) if device not in taken)


def _differ(setting: Setting) -> bool:
    """Whether devices differ, or the links between them."""
    inner = (1, *(tier.ranks for tier in setting.cluster.tiers))
    levels = sum(ranks < len(setting.limits) for ranks in inner[:-1])
    return not setting.equal or levels > 1 or bool(setting.cluster.pairs)


def _worth(alone: Space, answer: Answer) -> bool:
    """Whether links as fast as the fastest would make the step shorter: no order does more for equal devices."""
    cluster, count = alone.setting.cluster, len(alone.setting.limits)
    links = {link for a, b in combinations(range(count), 2) if (link := cluster.link(a, b))}
    fastest = Link(
        min(link.latency_s for link in links),
        max(link.bytes_per_s for link in links),
        min(link.late_s for link in links),
        reduce_latency_s=min(link.in_ring.latency_s for link in links),
        reduce_bytes_per_s=max(link.in_ring.bytes_per_s for link in links),
    )
    ideal = replace(cluster, tiers=(Tier("fastest", count, fastest),), pairs=())
    enough_s = _step_s(answer) * (1 - _WORTH)
    return _shorter(alone.under(replace(alone.setting, cluster=ideal)), enough_s, first=False) is not None


def _kind(setting: Setting, device: int) -> tuple[float, int]:
    return setting.speed(device), setting.limits[device]


def _classes(setting: Setting) -> list[int]:
    """For each device the first one that is alike: as fast, with as much memory, and joined to all others as it is."""
    count, link = len(setting.limits), setting.cluster.link
    classes: list[int] = []
    for device in range(count):
        alike = (
            first
            for first in dict.fromkeys(classes)
            if _kind(setting, first) == _kind(setting, device)
            and all(link(first, other) == link(device, other) for other in range(count) if other not in (first, device))
        )
        classes.append(next(alike, device))
    return classes


def _pattern(setting: Setting, taken: Order) -> tuple[object, ...]:
    """All that matters of devices in their order: what they are, and the link between any two."""
    links = (setting.cluster.link(a, b) for a, b in combinations(taken, 2))
    return *(_kind(setting, device) for device in taken), *links


def _best(space: Space, alone: Space, answer: Answer, orders: list[Order]) -> tuple[Space, Answer]:
    """The best of all orders; the bound is the least of theirs."""
    best, found, least = space, answer, answer.lower_bound_s
    for order in orders:
        moved, below_s = _moved(space, order), _step_s(found) * (1 - SAME)
        other = search(_narrowed(moved, alone), below_s=below_s)
        least = min(least, other.lower_bound_s)
        if other.best is not None and other.best.found.step_s < below_s:
            best, found = moved, other
    return best, Answer(found.best, min(least, _step_s(found)))


def _climbed(space: Space, alone: Space, answer: Answer) -> tuple[Space, Answer]:
    """The best that swapping two devices reaches from their own order, or from the fastest ones first."""
    if answer.best is None or answer.best.case.replicas > 1:
        return space, answer
    case, setting = answer.best.case, space.setting
    kind = next(kind for kind in space.kinds if kind.name == case.outline.name)
    own = replace(alone, depths=(case.depth,), micro_batches=(case.micro_batch,), kinds=(kind,))
    left = min(_TRIED, max(1, _EFFORT // case.actions))
    order = tuple(range(len(setting.limits)))
    fastest = tuple(sorted(order, key=lambda device: (-setting.speed(device), -setting.limits[device], device)))
    best, found, tried = space, answer, {order}
    queue = iter([fastest, *_swapped(setting, order)])
    while left and (other := next(queue, None)) is not None:
        if other in tried:
            continue
        tried.add(other)
        left -= 1
        moved, below_s = _moved(space, other), _step_s(found) * (1 - SAME)
        shorter = _shorter(_narrowed(moved, own), below_s, first=case.large)
        if shorter is not None:
            best, found, queue = moved, Answer(shorter, answer.lower_bound_s), _swapped(setting, other)
    return best, Answer(found.best, min(answer.lower_bound_s, _step_s(found)))


def _shorter(space: Space, below_s: float, *, first: bool) -> Choice | None:
    """The best of a space where that is shorter, or the ``first`` good one that is."""
    found = glance(space, below_s=below_s) if first else search(space, below_s=below_s).best
    return found if found is not None and found.found.step_s < below_s else None


def _moved(space: Space, order: Order) -> Space:
    return space.under(replace(space.setting, order=order))


def _narrowed(space: Space, like: Space) -> Space:
    """The part of a space that another one is; they share what is made."""
    return replace(space, depths=like.depths, replicas=(1,), micro_batches=like.micro_batches, kinds=like.kinds)


def _swapped(setting: Setting, order: Order) -> Iterator[Order]:
    """The order with two devices swapped that are not alike, neighbours first."""
    classes = _classes(setting)
    for apart in range(1, len(order)):
        for place in range(len(order) - apart):
            a, b = order[place], order[place + apart]
            if classes[a] != classes[b]:
                moved = [*order]
                moved[place], moved[place + apart] = b, a
                yield tuple(moved)


def _step_s(answer: Answer) -> float:
    return answer.best.found.step_s if answer.best else float("inf")
