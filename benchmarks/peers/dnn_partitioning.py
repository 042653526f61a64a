"""The inputs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), and its objective.

A file has ``nodes`` (latency on an accelerator and on a CPU in ms, size in bytes, colour class, backward or not) and
``edges`` (cost in ms of moving the source's output once). Nodes of one colour go together; contiguity is asked of the
forward nodes. A stage on an accelerator costs its latencies and, once each, what crosses its boundary; one on a CPU
its latencies alone. On an accelerator sizes must add up to at most the memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.solvers.graph_dp import Answer, Costs, Option, best_order, smallest_longest
from autopipe.solvers.ideals import Dag, Family, Floats, Indices
from autopipe.solvers.traffic import Traffic, Value

ACCELERATOR, CPU = 0, 1


@dataclass(frozen=True, eq=False)
class Problem:
    """The contracted problem: each node of ``dag`` is a group of the file's nodes, ``names`` of their ids."""

    dag: Dag
    names: tuple[tuple[int, ...], ...]
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    values: tuple[Value, ...]
    memory_bytes: float
    cpus: int

    def costs(self, family: Family) -> Costs:
        """The loads of stages between ideals of a family, in ms."""
        traffic = Traffic(family, self.values)
        accelerator, cpu, size = (family.members @ each for each in (self.accelerator_ms, self.cpu_ms, self.size_bytes))

        def costs(option: int, inner: Indices, outer: Indices) -> Floats:
            if option == CPU:
                return np.asarray(cpu[None, outer] - cpu[inner, None])
            load = accelerator[None, outer] - accelerator[inner, None] + traffic.prices(inner, outer)
            too_large = size[None, outer] - size[inner, None] > self.memory_bytes
            return np.where(too_large, np.inf, load)

        return costs

    def solve(self, devices: int, *, linear: bool, seconds: float) -> Answer | None:
        """The smallest largest load on so many accelerators and the file's CPUs, along one order or over the DAG."""
        options = [Option(ACCELERATOR, self.accelerator_ms), Option(CPU, self.cpu_ms)]
        available = [devices, self.cpus]
        if linear:
            return best_order(self.dag, options, available, self.costs)
        return smallest_longest(self.dag, options, available, self.costs, seconds=seconds)


def read(path: Path) -> Problem:
    """The problem of a file."""
    content = json.loads(path.read_text())
    nodes: list[dict[str, Any]] = content["nodes"]
    edges = [(edge["sourceId"], edge["destId"], edge["cost"]) for edge in content["edges"]]
    group = _groups(nodes, edges)
    names: dict[int, list[int]] = defaultdict(list)
    for node in nodes:
        names[group[node["id"]]].append(node["id"])
    by_id = {node["id"]: node for node in nodes}

    def summed(key: str) -> Floats:
        return np.array([sum(by_id[i].get(key, 0.0) for i in names[g]) for g in range(len(names))])

    if not all(node["supportedOnFpga"] for node in nodes):
        raise UsageError(f"{path}: a node that no accelerator supports is not handled")
    forward = {node["id"] for node in nodes if not node["isBackwardNode"]}
    ahead = {(group[a], group[b]) for a, b, _ in edges if a in forward and b in forward and group[a] != group[b]}
    return Problem(
        Dag(len(names), tuple(sorted(ahead))),
        tuple(tuple(names[g]) for g in range(len(names))),
        summed("fpgaLatency"),
        summed("cpuLatency"),
        summed("size"),
        _values(edges, group),
        content["maxSizePerFPGA"],
        content["maxCPUs"],
    )


def _values(edges: Iterable[tuple[int, int, float]], group: dict[int, int]) -> tuple[Value, ...]:
    """What each node's output costs to move: once for a stage, however many readers it has."""
    readers: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = {}
    for source, target, price in edges:
        if group[source] != group[target]:
            readers[source].add(group[target])
            cost[source] = price
    return tuple(
        Value(group[source], tuple(sorted(each)), cost[source], cost[source])
        for source, each in readers.items()
        if cost[source] > 0
    )


def _groups(nodes: Iterable[dict[str, Any]], edges: Iterable[tuple[int, int, float]]) -> dict[int, int]:
    """The group of each node, numbered in the order of the file: its colour, and free leaves with their neighbour.

    A leaf that costs no time and has one neighbour loses nothing by going with it.
    """
    colour = {node["id"]: node.get("colorClass", -1 - node["id"]) for node in nodes}
    busy = {colour[node["id"]] for node in nodes if node["cpuLatency"] > 0 or node["fpgaLatency"] > 0}
    while leaf := _free_leaf(colour, busy, edges):
        colour = {node: leaf[1] if each == leaf[0] else each for node, each in colour.items()}
    numbers = {each: number for number, each in enumerate(dict.fromkeys(colour.values()))}
    return {node: numbers[each] for node, each in colour.items()}


def _free_leaf(
    colour: dict[int, int], busy: set[int], edges: Iterable[tuple[int, int, float]]
) -> tuple[int, int] | None:
    neighbours: dict[int, set[int]] = defaultdict(set)
    for source, target, _ in edges:
        if colour[source] != colour[target]:
            neighbours[colour[source]].add(colour[target])
            neighbours[colour[target]].add(colour[source])
    return next(((each, *near) for each, near in neighbours.items() if each not in busy and len(near) == 1), None)
