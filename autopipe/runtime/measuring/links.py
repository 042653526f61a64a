"""The devices of a run and the links between them: latency and bandwidth both ways at once, as a pipeline uses them.

A pair exchanges messages of one size, receives posted before sends (the other way round halves gloo's bandwidth). The
latency is the time of the smallest messages; the bandwidth is what the largest ones need beyond it. What a late
receiver waits (Link.late_s) is read off a small pipeline between the first two ranks; what a sum of gradients takes is
measured between the first two of a host, and between the first two on different hosts. How fast a device is, relative
to rank 0's, comes from one kernel that all ranks run at once. Under torchrun the ranks may be on several hosts: then
links between hosts are a tier of their own.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.runtime.ranks import launch
from autopipe.runtime.ranks.devices import (
    cores,
    default_device,
    describe,
    is_as_fast,
    memory_bytes,
    own_device,
    synchronize,
)
from autopipe.runtime.ranks.gradients import sum_gradients
from autopipe.runtime.tables.emulated import MESSAGE_NUMBERS, NUMBER_BYTES, runtime_costs

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
REPEATS = 15
TIMEOUT_S = 120.0
DIFFERENT = 2.0
"""A pair whose bandwidth is this many times off its tier's median is listed apart."""
KERNEL = {"cpu": (256, 400), "cuda": (4096, 40)}
"""The side of the matrices that are multiplied to compare devices, and how often."""
AT_ONCE_S = 1e-3
"""A message that a link carries in this time counts as one that takes none."""
SMALL, USUAL, MANY = 1 << 8, 1 << 18, 16
"""Gradients are summed of one parameter with few numbers, and of many with a usual number."""
MOST_PAIRS = 28
"""So many pairs of a tier are measured, those of neighbours first."""

Links = Mapping[tuple[int, int], Link]


class Found(NamedTuple):
    """What a rank says of itself, and the links that it was the first of."""

    host: str
    device: str
    memory_bytes: int
    kernel_s: float
    links: dict[tuple[int, int], Link]


def measure_cluster(
    devices: int | None = None, *, threads: int = 1, progress: Callable[[str], None] | None = None
) -> Cluster:
    """The local devices (2 by default), or under torchrun all of its ranks, and their links.

    CPU devices beyond the cores are taken to be linked as the ones that were measured. Raises RankFailed when a
    process dies.
    """
    kind = default_device()
    joined = dist.is_torchelastic_launched()
    count = devices or (int(os.environ["WORLD_SIZE"]) if joined else 2)
    ranks = count if joined or kind == "cuda" else min(count, max(2, cores()))
    if count == 1:
        return Cluster("local", (Device(describe(kind, threads), memory_bytes(kind, 1)),), (), origin="measured")
    found = launch.launch(
        measure_rank, (kind, threads), ranks=ranks, timeout_s=TIMEOUT_S, threads=threads, device=kind, progress=progress
    )
    return cluster_of(found, count)


def cluster_of(found: Sequence[Found], count: int) -> Cluster:
    """The cluster of what all ranks found; ``count`` devices where more are planned for than were measured."""
    links = {pair: link for each in found for pair, link in each.links.items()}
    hosts = [each.host for each in found]
    inside = {pair: link for pair, link in links.items() if hosts[pair[0]] == hosts[pair[1]]}
    between = {pair: link for pair, link in links.items() if pair not in inside}
    tiers = []
    if inside:
        tiers.append(Tier("host" if between else "local", _on_a_host(hosts) if between else count, _usual(inside)))
    if between:
        tiers.append(Tier("network", count, _usual(between)))
    of_tier = [(pair, link, tiers[-1 if pair in between else 0].link) for pair, link in links.items()]
    pairs = tuple(Pair(*pair, link) for pair, link, usual in of_tier if _differs(link, usual))
    name = "local" if len(set(hosts)) == 1 else f"{len(set(hosts))} hosts"
    return Cluster(name, _devices(found, count), tuple(tiers), pairs, origin="measured")


def _on_a_host(hosts: Sequence[str]) -> int:
    """The ranks of a host; of the smallest one where they differ, so that no tier claims a link that is not there."""
    return min(len(list(group)) for _, group in itertools.groupby(hosts))


def _usual(links: Links) -> Link:
    """The median of the links; sums of gradients are measured over one of them."""
    return Link(
        statistics.median(link.latency_s for link in links.values()),
        statistics.median(link.bytes_per_s for link in links.values()),
        statistics.median(link.late_s for link in links.values()),
        reduce_latency_s=next((link.reduce_latency_s for link in links.values() if link.reduce_latency_s), None),
        reduce_bytes_per_s=next((link.reduce_bytes_per_s for link in links.values() if link.reduce_bytes_per_s), None),
    )


def _differs(link: Link, usual: Link) -> bool:
    ratio = link.bytes_per_s / usual.bytes_per_s
    return ratio > DIFFERENT or ratio < 1 / DIFFERENT


def _devices(found: Sequence[Found], count: int) -> tuple[Device, ...]:
    """Equal neighbours as one entry; the devices that were not measured are like the last one.

    CPU ranks that were planned for beyond the cores share the memory of the host with the others.
    """
    memory = [each.memory_bytes * len(found) // count if count > len(found) else each.memory_bytes for each in found]
    singles = [
        Device(each.device, size, speed=_speed(each, found[0])) for each, size in zip(found, memory, strict=True)
    ]
    singles += singles[-1:] * (count - len(found))
    return tuple(replace(device, count=len(list(group))) for device, group in itertools.groupby(singles))


def _speed(each: Found, first: Found) -> float:
    """The speed relative to rank 0's device, in two digits."""
    ratio = first.kernel_s / each.kernel_s
    same = each.device == first.device and is_as_fast(ratio)
    return 1.0 if same else float(f"{ratio:.2g}")


def measure_rank(kind: str, threads: int) -> Found:
    """One rank's part: its device, then every pair in turn."""
    device = own_device(kind)
    launch.beat.phase("comparing the devices")
    dist.barrier()
    kernel = kernel_s(device)
    found = {}
    for first, second in measured_pairs(dist.get_world_size()):
        launch.beat.phase(f"measuring the link between ranks {first} and {second}")
        dist.barrier()
        link = _measure_pair(first, second, device)
        if link is not None:
            found[first, second] = link
    launch.beat.phase("measuring what late receives cost")
    late = torch.tensor([_late_s(found.get((0, 1)), device)], device=device)
    dist.broadcast(late, 0)
    links = {ranks: replace(link, late_s=float(late)) for ranks, link in found.items()}
    for pair in _pairs_that_sum():
        launch.beat.phase(f"measuring sums of gradients between ranks {pair[0]} and {pair[1]}")
        latency_s, bytes_per_s = _sum_costs(pair, device)
        if pair in links:
            links[pair] = replace(links[pair], reduce_latency_s=latency_s, reduce_bytes_per_s=bytes_per_s)
    memory = memory_bytes(kind, int(os.environ["LOCAL_WORLD_SIZE"]))
    return Found(_host(), describe(kind, threads), memory, kernel, links)


def _late_s(link: Link | None, device: torch.device) -> float:
    """What a late receive waits between ranks 0 and 1, of a message that the link, known to rank 0, carries at once."""
    pair, numbers = dist.new_group([0, 1]), torch.tensor([MESSAGE_NUMBERS], device=device)
    if link is not None:
        numbers.clamp_(max=max(1, int(link.bytes_per_s * AT_ONCE_S / NUMBER_BYTES)))
    dist.broadcast(numbers, 0)
    return runtime_costs(device, pair, int(numbers))[1] if dist.get_rank() < 2 else 0.0


def _pairs_that_sum() -> list[tuple[int, int]]:
    """The first measured pair of one host, and the first of two."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, _host())
    first: dict[bool, tuple[int, int]] = {}
    for pair in measured_pairs(len(hosts)):
        first.setdefault(hosts[pair[0]] == hosts[pair[1]], pair)
    return list(first.values())


def _sum_costs(pair: tuple[int, int], device: torch.device) -> tuple[float, float]:
    """What latency and rate come to in a sum over two ranks: 2 messages of half the bytes each. All ranks call it."""
    group = dist.new_group(list(pair))
    if dist.get_rank() not in pair:
        return 0.0, 0.0
    least_s = _sum_s([nn.Parameter(torch.zeros(SMALL, device=device))], group, device)
    many = [nn.Parameter(torch.zeros(USUAL, device=device)) for _ in range(MANY)]
    more_s = _sum_s(many, group, device) - least_s
    return least_s / 2, sum(parameter.nbytes for parameter in many) / max(more_s, 1e-9)


def _sum_s(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> float:
    """Median seconds in which gradients are summed as after a step."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    seconds = []
    for _ in range(REPEATS + 3):
        dist.barrier(group)
        synchronize(device)
        start = time.perf_counter()
        sum_gradients(parameters, group)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:])


def _host() -> str:
    """The host's name, with the network namespace on Linux: two namespaces behave as two hosts."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return platform.node()


def measured_pairs(ranks: int) -> list[tuple[int, int]]:
    """The pairs to measure, nearest first: all where they are few, for a pipeline uses neighbours."""
    every = sorted(itertools.combinations(range(ranks), 2), key=lambda pair: (pair[1] - pair[0], pair))
    return every[: max(MOST_PAIRS, ranks - 1)]


def kernel_s(device: torch.device) -> float:
    """Median seconds of one multiplication of matrices; the first quarter is warm-up."""
    side, times = KERNEL[device.type]
    factor = torch.ones(side, side, device=device)
    seconds = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(factor, factor)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[times // 4 :])


def _measure_pair(first: int, second: int, device: torch.device) -> Link | None:
    """The link as the first of the two sees it; None on other ranks."""
    rank = dist.get_rank()
    if rank not in (first, second):
        return None
    peer = second if rank == first else first
    times = {size: _exchange_s(size, peer, device) for size in SIZES}
    latency_s = times[SIZES[0]]
    return Link(latency_s, SIZES[-1] / max(times[SIZES[-1]] - latency_s, 1e-9)) if rank == first else None


def _exchange_s(size: int, peer: int, device: torch.device) -> float:
    """Seconds in which both sides send and receive ``size`` bytes: the first quartile, after some for warm-up.

    On a CPU a message now and then waits for the next tick of the scheduler, in some runs most of them do: that is no
    property of the link, and what a pipeline waits because of it is Link.late_s.
    """
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    incoming = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(REPEATS + 3):
        synchronize(device)
        start = time.perf_counter()
        receive = dist.P2POp(dist.irecv, incoming, peer)
        send = dist.P2POp(dist.isend, outgoing, peer)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.quantiles(seconds[3:], n=4)[0]
