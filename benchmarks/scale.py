"""Seconds of the whole search, against layers, devices and memory.

    python benchmarks/scale.py [--layers 98,200] [--devices 64,256,1024,4096,16384] [--memory 141,96] [--rounds 3]

A GPT-3-shaped profile (benchmarks/shapes.py) on nodes of eight devices and two tiers of links, global batch 2,048,
micro-batches 1 to 8, all depths and all numbers of replicas that divide the batch. A row is the best of the rounds, in
CPU seconds of this process: from profile and cluster to the plan with its bound, why-nots and limit.
"""

from __future__ import annotations

import argparse
import time

from shapes import gpt, racks

from autopipe import plan
from autopipe.core.errors import AutopipeError
from autopipe.core.plan import Plan

GLOBAL_BATCH = 2048
REPLICAS = tuple(2**k for k in range(12))


def searched(layers: int, devices: int, memory_bytes: int) -> tuple[float, Plan | None]:
    """CPU seconds, and the plan; None where none fits."""
    profile, cluster = gpt(layers), racks(devices, memory_bytes)
    started = time.process_time()
    try:
        made = plan(profile, cluster, global_batch=GLOBAL_BATCH, replicas=[r for r in REPLICAS if r <= devices])
    except AutopipeError:
        made = None
    return time.process_time() - started, made


def row(layers: int, devices: int, memory: int, rounds: int) -> str:
    """A line of the table."""
    found = [searched(layers, devices, memory * 2**30) for _ in range(rounds)]
    seconds, made = min(found, key=lambda one: one[0])
    if made is None:
        what = "nothing fits"
    else:
        again = sum(len(stage.recompute) for stage in made.stages)
        what = (
            f"{made.depth} × {made.replicas} devices, {made.micro_batches} micro-batches of {made.micro_batch}, "
            f"{made.schedule.name}, {again} layers recompute, {made.predicted.step_s:.2f} s, gap {100 * made.gap:.1f} %"
        )
    return f"{layers:>6} {devices:>8} {memory:>7} {seconds:>7.2f}  {what}"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="98,200")
    parser.add_argument("--devices", default="64,256,1024,4096,16384")
    parser.add_argument("--memory", default="141,96", help="GiB of a device: loose, tight")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    searched(4, 2, 2**40)  # imports and caches are not what is measured
    print("layers  devices  memory  CPU s  plan")
    for layers in map(int, asked.layers.split(",")):
        for devices in map(int, asked.devices.split(",")):
            for memory in map(int, asked.memory.split(",")):
                print(row(layers, devices, memory, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
