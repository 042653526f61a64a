"""Latency and bandwidth between ranks, both directions at once, as a pipeline uses them.

A pair exchanges messages of one size, receives posted before sends (the other way round halves gloo's bandwidth). The
latency is the median time of the smallest messages; the bandwidth is what the largest ones need beyond it. What a late
receiver waits (Link.late_s) is read off a small pipeline between the first two ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from autopipe.core.cluster import Cluster, Device, Link, Pair, Tier
from autopipe.runtime import launch
from autopipe.runtime.devices import cores, default_device, describe, memory_bytes, own_device, synchronize
from autopipe.runtime.emulated import runtime_costs

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
REPEATS = 15
TIMEOUT_S = 120.0
DIFFERENT = 2.0
"""A pair whose bandwidth is this many times off the median is listed apart."""


def measure_cluster(devices: int, *, threads: int = 1, progress: Callable[[str], None] | None = None) -> Cluster:
    """The local devices and their links. Raises RankFailed when a process dies.

    CPU devices beyond the cores are taken to be linked as the ones that were measured.
    """
    kind = default_device()
    device = Device(describe(kind, threads), memory_bytes(kind, devices), devices)
    if devices == 1:
        return Cluster("local", (device,), (), origin="measured")
    ranks = devices if kind == "cuda" else min(devices, max(2, cores()))
    found = launch.launch(
        _measure_rank, (kind,), ranks=ranks, timeout_s=TIMEOUT_S, threads=threads, device=kind, progress=progress
    )[0]
    usual = Link(
        statistics.median(link.latency_s for link in found.values()),
        statistics.median(link.bytes_per_s for link in found.values()),
        statistics.median(link.late_s for link in found.values()),
    )
    pairs = tuple(Pair(a, b, link) for (a, b), link in found.items() if _differs(link, usual))
    return Cluster("local", (device,), (Tier("local", devices, usual),), pairs, origin="measured")


def _differs(link: Link, usual: Link) -> bool:
    ratio = link.bytes_per_s / usual.bytes_per_s
    return ratio > DIFFERENT or ratio < 1 / DIFFERENT


def _measure_rank(kind: str) -> dict[tuple[int, int], Link]:
    device = own_device(kind)
    found = {}
    for first, second in itertools.combinations(range(dist.get_world_size()), 2):
        launch.beat.phase(f"measuring the link between ranks {first} and {second}")
        dist.barrier()
        link = _measure_pair(first, second, device)
        if link is not None:
            found[first, second] = link
    launch.beat.phase("measuring what late receives cost")
    pair = dist.new_group([0, 1])
    late_s = runtime_costs(device, pair)[1] if dist.get_rank() < 2 else 0.0
    return {ranks: replace(link, late_s=late_s) for ranks, link in found.items()}


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
    """Median seconds in which both sides send and receive ``size`` bytes; the first exchanges are warm-up."""
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
    return statistics.median(seconds[3:])
