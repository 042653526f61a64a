"""How fast partitions of one order are simulated, and how much faster than a plain longest path in Python.

    python benchmarks/simulate.py [--candidates 1000] [--repeats 7]

1F1B on stages of random costs. Seconds are those of the processor, the least of the repeats; the plain longest path
runs a few candidates in the same process, and counts for all. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.schedule import Action, Op, Schedule, kind
from autopipe.core.validation import sequence
from autopipe.graph import OPS, Costs, Graph

GOALS_S = {(8, 32): 0.002, (64, 512): 0.4}
"""Seconds for 1,000 candidates, by ranks and micro-batches."""


class Figures(NamedTuple):
    """Seconds to make the graph, to simulate all candidates, and what plain Python takes for as many."""

    compile_s: float
    all_s: float
    plain_s: float


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """The least processor time of some repeats."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def random_costs(table: Schedule, candidates: int) -> Costs:
    """Uneven stages, hops and optimizers."""
    rng = np.random.default_rng(0)
    stages = table.stages
    transfers = 0.1 * rng.random((2 * stages, candidates))
    transfers[[0, 2 * stages - 1]] = 0
    actions = 0.5 + rng.random((len(OPS) * stages, candidates))
    return Costs(actions, transfers, rng.random((stages, candidates)), np.zeros(2 * stages))


def plain_step(order: list[tuple[int, Action]], table: Schedule, actions: list[float], transfers: list[float]) -> float:
    """The longest path of one candidate, action by action in an order in which values come before their use."""
    ends: dict[tuple[int, bool, int], float] = {}
    free = [0.0] * table.ranks
    for rank, (stage, op, batch) in order:
        if op is Op.F:
            value, row = (stage - 1, True, batch), stage
        else:
            value, row = (stage + 1, False, batch), table.stages + stage
        begin = max(free[rank], ends.get(value, 0.0) + transfers[row])
        free[rank] = begin + actions[len(OPS) * stage + OPS.index(op)]
        ends[stage, op is Op.F, batch] = free[rank]
    return max(free)


def in_order(table: Schedule) -> list[tuple[int, Action]]:
    """The actions with their ranks, each after those that it waits for."""
    return [(rank, table.order[rank][place]) for rank, place in sequence(table)]


def measure(ranks: int, micro_batches: int, candidates: int, repeats: int) -> Figures:
    """The figures of one size; the two simulators must agree."""
    table = kind("1F1B").schedule(ranks, micro_batches)
    costs = random_costs(table, candidates)
    graph = Graph.of(table)
    steps = graph.steps(costs._replace(optimizer_s=np.zeros_like(costs.optimizer_s)))
    order, few = in_order(table), random.Random(0).sample(range(candidates), min(3, candidates))
    columns = [(costs.actions_s[:, n].tolist(), costs.transfers_s[:, n].tolist()) for n in few]
    for n, (actions, transfers) in zip(few, columns, strict=True):
        assert abs(plain_step(order, table, actions, transfers) / steps[n] - 1) < 1e-12
    plain = cpu_s(lambda: [plain_step(order, table, *column) for column in columns], repeats)
    return Figures(
        cpu_s(lambda: Graph.of(table), 1),
        cpu_s(lambda: graph.steps(costs), repeats),
        plain / len(few) * candidates,
    )


def main() -> None:
    """Print a line a size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    missed = False
    for (ranks, batches), goal_s in GOALS_S.items():
        found = measure(ranks, batches, options.candidates, options.repeats)
        limit_s = goal_s * options.candidates / 1000
        missed |= found.all_s > limit_s
        rate = 2 * ranks * batches * options.candidates / found.all_s
        print(
            f"p{ranks} m{batches}: {options.candidates} candidates in {1e3 * found.all_s:.2f} ms (goal "
            f"{1e3 * limit_s:g} ms), {rate / 1e6:.0f} M actions/s, {found.plain_s / found.all_s:.0f} times as fast as "
            f"plain Python; graph made once in {1e3 * found.compile_s:.1f} ms"
        )
    sys.exit(missed)


if __name__ == "__main__":
    main()
