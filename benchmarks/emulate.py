"""Rehearsed plans against their prediction: 8 and 16 ranks on whatever cores there are, waiting instead of computing.

    python benchmarks/emulate.py [--ranks 8,16]

The planner makes each plan for uneven layers over links of 1 GB/s and 0.5 ms. ``plain`` is the plan's own step,
``predicted`` the same with this machine's costs of an action and a message, which each run measures on another
pipeline first. Needs an otherwise idle machine: ranks that wait must be woken when their time is over.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace

import autopipe
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.plan import Plan
from autopipe.core.profile import CostTable, Edge, Layer, LayerCost, Profile
from autopipe.core.units import format_duration, format_percent
from autopipe.runtime.checking.rehearsal import rehearse

SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "ZB-V", "Interleaved1F1B")
LAYERS_A_RANK = 4
MESSAGE_BYTES = 1 << 18


def profile(layers: int) -> Profile:
    """Layers of 3 to 6 ms forward, twice that backward; the same in every run."""
    draw = random.Random(0)
    times = [draw.uniform(0.003, 0.006) for _ in range(layers)]
    costs = [LayerCost(t, 2 * t, 1.1 * t, t, 1 << 20, 1 << 19, MESSAGE_BYTES, optimizer_s=1e-4) for t in times]
    return Profile(
        model="uneven layers",
        layers=tuple(Layer(f"layers.{i}", 4096, 1024, (f"layers.{i}",)) for i in range(layers)),
        edges=tuple(Edge(f"x{i}", i, (i + 1,), ("b", MESSAGE_BYTES // 4), "float32") for i in range(layers - 1)),
        costs=(CostTable(1, tuple(costs)),),
        device="a device that is waited for",
        dtype="float32",
    )


def planned(schedule: str, ranks: int) -> Plan:
    """The plan of a schedule at a number of ranks."""
    cluster = Cluster("net", (Device("device", 1 << 34, ranks),), (Tier("net", ranks, Link(5e-4, 1e9)),))
    return autopipe.plan(
        profile(LAYERS_A_RANK * ranks), cluster, global_batch=2 * ranks, depths=(ranks,), schedules=(schedule,)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,16")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    arguments = parser.parse_args()
    print(f"{'plan':26} {'plain':>9} {'predicted':>10} {'measured':>10} {'error':>7} {'spread':>7} {'an action':>10}")
    errors = []
    for ranks in map(int, arguments.ranks.split(",")):
        for schedule in arguments.schedules.split(","):
            plan = planned(schedule, ranks)
            result = rehearse(replace(plan, overhead_s=0.0), timeout_s=120)
            errors.append(abs(result.error))
            plain_s = result.factor * plan.predicted.step_s
            print(
                f"{f'{schedule}, {ranks} ranks':26} {format_duration(plain_s):>9} "
                f"{format_duration(result.predicted.step_s):>10} {format_duration(result.step_s):>10} "
                f"{format_percent(result.error, sign=True):>7} {format_percent(result.spread):>7} "
                f"{format_duration(result.overhead_s):>10}",
                flush=True,
            )
    print(f"median |error| {format_percent(statistics.median(errors))}, worst {format_percent(max(errors))}")


if __name__ == "__main__":
    main()
