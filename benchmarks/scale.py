"""Seconds of the whole search, against layers, devices and memory.

    python benchmarks/scale.py [--layers 98,200] [--devices 64,256,1024,4096,16384] [--memory 141,96] [--rounds 3]

A GPT-3-shaped profile (benchmarks/shapes.py) on nodes of eight devices and two tiers of links, global batch 2,048,
micro-batches 1 to 8, all depths and all numbers of replicas that divide the batch. A row is the best of the rounds, in
CPU seconds of this process: from profile and cluster to the plan with its bound, limit and table of actions; and
besides, what the why-nots take: the best other depths, numbers of replicas, micro-batches and schedules, a search each.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple
from unittest import mock

from shapes import gpt, racks

from autopipe import search
from autopipe.core.errors import AutopipeError
from autopipe.core.plan import Plan
from autopipe.planning.whynot import rejected

GLOBAL_BATCH = 2048
REPLICAS = tuple(2**k for k in range(12))


class Searched(NamedTuple):
    """CPU seconds of plan and gap, those of the why-nots, and the plan; None where none fits."""

    plan_s: float
    others_s: float
    made: Plan | None


def searched(layers: int, devices: int, memory_bytes: int) -> Searched:
    """One search."""
    profile, cluster = gpt(layers), racks(devices, memory_bytes)
    replicas, others_s = [r for r in REPLICAS if r <= devices], [0.0]

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        rows = rejected(*args)
        others_s.append(time.process_time() - begin)
        return rows

    started = time.process_time()
    try:
        with mock.patch.object(search, "rejected", timed):
            made = search.plan(profile, cluster, global_batch=GLOBAL_BATCH, replicas=replicas)
    except AutopipeError:
        made = None
    return Searched(time.process_time() - started - sum(others_s), sum(others_s), made)


def row(layers: int, devices: int, memory: int, rounds: int) -> str:
    """A line of the table."""
    found = [searched(layers, devices, memory * 2**30) for _ in range(rounds)]
    plan_s, others_s, made = min(found, key=lambda one: one.plan_s)
    if made is None:
        what = "nothing fits"
    else:
        again = sum(len(stage.recompute) for stage in made.stages)
        what = (
            f"{made.depth} × {made.replicas} devices, {made.micro_batches} micro-batches of {made.micro_batch}, "
            f"{made.schedule.name}, {again} layers recompute, {made.predicted.step_s:.2f} s, gap {100 * made.gap:.1f} %"
        )
    return f"{layers:>6} {devices:>8} {memory:>7} {plan_s:>7.2f} {others_s:>9.2f}  {what}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="98,200")
    parser.add_argument("--devices", default="64,256,1024,4096,16384")
    parser.add_argument("--memory", default="141,96", help="GiB of a device: loose, tight")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    searched(4, 2, 2**40)  # imports and caches are not what is measured
    print("layers  devices  memory  CPU s  why-nots  plan")
    for layers in map(int, asked.layers.split(",")):
        for devices in map(int, asked.devices.split(",")):
            for memory in map(int, asked.memory.split(",")):
                print(row(layers, devices, memory, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
