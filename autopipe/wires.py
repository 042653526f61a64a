"""Transfers over a wire that several links share, a node's way out for instance: one after the other.

Each message takes the wire for its bytes / bandwidth, in the order in which the messages are made; the latency comes on
top and keeps nobody waiting. Which message comes first depends on all that happened before, so there is no fixed graph
to walk: actions are run in the order of time.

    two hops over one wire, 2 s a message, the values made at 0 and at 1 s:

    wire   |first |second|
           0      2      4
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Link

Floats = NDArray[np.float64]


class Wires(NamedTuple):
    """By the row of a transfer (see graph.Costs): the number of its wire, −1 for one of its own, and its latency."""

    numbers: tuple[int, ...]
    latency_s: tuple[float, ...]

    def in_ticks(self, tick_s: float) -> Wires:
        """The same with latencies in ticks."""
        return self._replace(latency_s=tuple(latency / tick_s for latency in self.latency_s))


def wires_of(hops: Sequence[Link | None]) -> Wires | None:
    """The wires of the hops from stage to stage, there and back; None where none is shared."""
    if not any(hop and hop.wires for hop in hops):
        return None
    there = ["", *(hop.wires[0] if hop and hop.wires else "" for hop in hops)]
    back = [*(hop.wires[1] if hop and hop.wires else "" for hop in hops), ""]
    latency_s = [hop.latency_s if hop else 0.0 for hop in hops]
    known = {name: number for number, name in enumerate(dict.fromkeys(name for name in (*there, *back) if name))}
    return Wires(tuple(known.get(name, -1) for name in (*there, *back)), (0.0, *latency_s, *latency_s, 0.0))


class Flow(NamedTuple):
    """Actions by row number, from 1: the one before on the rank, the one that makes the value, its way's row.

    Row 0 is the start of the step.
    """

    before: Sequence[int]
    source: Sequence[int]
    transfer: Sequence[int]


def queued_ends(
    flow: Flow, actions_s: Sequence[float], transfers_s: Sequence[float], wires: Wires, waits: Sequence[float]
) -> list[float]:
    """When each action ends, by row. ``waits`` is what each row waits at least after the one before it."""
    count = len(flow.before)
    after, reader = [0] * count, [0] * count
    for row in range(1, count):
        after[flow.before[row]] = row
        reader[flow.source[row]] = row
    ends, arrivals = [-1.0] * count, [-1.0] * count
    ends[0] = 0.0
    free = dict.fromkeys(wires.numbers, 0.0)
    running: list[tuple[float, int]] = []

    def start(row: int) -> None:
        """Run an action whose rank is free and whose value is there."""
        if row and ends[flow.before[row]] >= 0 and arrivals[row] >= 0:
            begin = max(ends[flow.before[row]] + waits[row], arrivals[row])
            heapq.heappush(running, (begin + actions_s[row], row))

    def send(row: int, made_s: float) -> None:
        """Bring an action the value that it needs."""
        transfer = flow.transfer[row]
        wire, takes_s = wires.numbers[transfer], transfers_s[transfer]
        begin = max(made_s, free[wire]) if wire >= 0 else made_s
        free[wire] = begin + max(0.0, takes_s - wires.latency_s[transfer])
        arrivals[row] = begin + takes_s

    for row in range(1, count):
        if flow.source[row] == 0:
            arrivals[row] = transfers_s[flow.transfer[row]]
    for row in range(1, count):
        if flow.before[row] == 0:
            start(row)
    while running:
        now, row = heapq.heappop(running)
        ends[row] = now
        if reader[row]:
            send(reader[row], now)
            if reader[row] != after[row]:
                start(reader[row])
        start(after[row])
    return ends
