"""The inputs of Piper (NeurIPS 2021), and its objective.

Each node of a file has, for each tensor-parallel degree t, ways to run: with all activations kept, or recomputed. A
way has seconds a sample, parameter bytes, and memory a · y + b. Edges have bytes; with t > 1 more bytes are
synchronised where an edge crosses the stage's boundary.

A stage with data-parallel degree d and tensor-parallel degree t runs on d · t devices and takes, with p of each node's
way and w its parameters, (Σ p + (2 Σ (edge + synchronised) + 4 (d − 1) Σ w / N) / bandwidth) / d. Its memory is
Σ (a · y + b) with y = ⌈degrees d of this and all later stages together / d⌉, and d divides N, the micro-batches of a
batch. The longest stage is to be shortest. Which nodes recompute is chosen exactly: nodes that free as much are taken
in the order of their seconds, and every number of each such kind is tried.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.solvers.ideals import Dag, Family, Floats, prefixes
from autopipe.solvers.traffic import Traffic, Value

_MOST_CHOICES = 100_000


@dataclass(frozen=True, eq=False)
class Ways:
    """How nodes run at one tensor-parallel degree. Of shape (nodes,), as they are when all is kept; then the changes
    when a node recomputes: seconds more, and what goes from a and b."""

    seconds: Floats
    parameters: Floats
    memory_a: Floats
    memory_b: Floats
    extra_s: Floats
    freed_a: Floats
    freed_b: Floats
    crossing: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """A graph, the ways to run it by tensor-parallel degree, N (micro-batches of a batch), and the file's cluster."""

    dag: Dag
    names: tuple[str, ...]
    ways: dict[int, Ways]
    batch: int
    devices: int
    memory_bytes: float
    bytes_per_s: float


class Stage(NamedTuple):
    """The nodes up to an ideal, with degrees t and d, in so many seconds."""

    until: int
    tensor: int
    data: int
    seconds: float


class Solution(NamedTuple):
    """The longest stage, and all stages from the first on."""

    value: float
    stages: tuple[Stage, ...]


class Degrees(NamedTuple):
    """Tensor- and data-parallel degrees."""

    tensor: int
    data: int


def solve(
    problem: Problem, devices: int, memory_bytes: float, bytes_per_s: float, *, replicas: int, linear: bool
) -> Solution | None:
    """The smallest longest stage on at most so many devices; None where nothing fits.

    From the last stage to the first: for each ideal that comes before, devices and sum of degrees d, the least longest
    stage of the rest.
    """
    sets = prefixes(next(problem.dag.orders(1))) if linear else problem.dag.ideals(_MOST_CHOICES)
    if sets is None:
        raise UsageError(f"the graph has more than {_MOST_CHOICES} ideals: use --order linear")
    program = _Program(problem, Family(sets, problem.dag.nodes, problem.ways[1].seconds), devices, memory_bytes)
    program.fill(bytes_per_s, replicas)
    return program.traced()


class _Program:
    """Values by ideal, devices and sum of degrees; each is the least for at most so many."""

    def __init__(self, problem: Problem, family: Family, devices: int, memory_bytes: float) -> None:
        self.problem, self.family, self.devices, self.memory_bytes = problem, family, devices, memory_bytes
        self.most = min(devices, problem.batch)
        self.values = np.full((len(family), devices + 1, self.most + 1), np.inf)
        self.values[-1] = 0.0
        self.costs: dict[tuple[int, int], list[tuple[Degrees, Floats]]] = {}

    def fill(self, bytes_per_s: float, replicas: int) -> None:
        """All values, ideals from the largest to the empty one."""
        numbers = np.arange(len(self.family))
        contained = self.family.contained(numbers, numbers) & (numbers[:, None] < numbers)
        crossing = {
            t: Traffic(self.family, ways.crossing).prices(numbers, numbers) for t, ways in self.problem.ways.items()
        }
        for inner in reversed(range(len(self.family) - 1)):
            for outer in map(int, np.flatnonzero(contained[inner])):
                self.costs[inner, outer] = [
                    stage
                    for t in self.problem.ways
                    for stage in self._stages(inner, outer, t, float(crossing[t][inner, outer]), bytes_per_s, replicas)
                ]
                for degrees, seconds in self.costs[inner, outer]:
                    self._use(inner, outer, degrees, seconds)
            for axis in (0, 1):
                np.minimum.accumulate(self.values[inner], axis=axis, out=self.values[inner])

    def _use(self, inner: int, outer: int, degrees: Degrees, seconds: Floats) -> None:
        used, d = degrees.tensor * degrees.data, degrees.data
        rest = self.values[outer, : self.devices + 1 - used, : self.most + 1 - d]
        found = self.values[inner, used:, d:]
        np.minimum(found, np.maximum(rest, seconds[d:]), out=found)

    def _stages(
        self, inner: int, outer: int, tensor: int, crossing: float, bytes_per_s: float, replicas: int
    ) -> list[tuple[Degrees, Floats]]:
        """The seconds of a stage by sum of degrees, for each d that may be."""
        ways = self.problem.ways[tensor]
        nodes = np.flatnonzero(self.family.members[outer] & ~self.family.members[inner])
        least = self._least_seconds(ways, nodes)
        parameters = ways.parameters[nodes].sum()
        result = []
        for d in range(1, min(self.most, replicas, self.devices // tensor) + 1):
            if self.problem.batch % d == 0:
                sent_s = (2 * crossing + 4 * (d - 1) * parameters / self.problem.batch) / bytes_per_s
                seconds = least[-(-np.arange(self.most + 1) // d)]
                result.append((Degrees(tensor, d), (seconds + sent_s) / d))
        return [(degrees, seconds) for degrees, seconds in result if np.isfinite(seconds[degrees.data])]

    def _least_seconds(self, ways: Ways, nodes: np.ndarray) -> Floats:
        """Σ p for y = 0, 1, …: the least with which the memory suffices, infinite where none does."""
        y = np.arange(self.most + 1)
        missing = ways.memory_a[nodes].sum() * y + ways.memory_b[nodes].sum() - self.memory_bytes
        extra, freed_a, freed_b = _choices(ways, nodes) if (missing > 0).any() else np.zeros((3, 1))
        enough = freed_a[:, None] * y + freed_b[:, None] >= missing
        return np.asarray(ways.seconds[nodes].sum() + np.where(enough, extra[:, None], np.inf).min(axis=0))

    def traced(self) -> Solution | None:
        """The stages of the best value, on the fewest devices and then degrees."""
        value = self.values[0, -1, -1]
        if not np.isfinite(value):
            return None
        good = np.argwhere(self.values[0] <= value)
        used, degrees, inner = int(good[0][0]), int(good[0][1]), 0
        stages = []
        while inner < len(self.family) - 1:
            stage, outer = self._stage(inner, used, degrees, value)
            stages.append(stage)
            inner, used, degrees = outer, used - stage.tensor * stage.data, degrees - stage.data
        return Solution(float(max(stage.seconds for stage in stages)), tuple(stages))

    def _stage(self, inner: int, used: int, degrees: int, value: float) -> tuple[Stage, int]:
        """The first stage after an ideal, with which no stage takes longer than the value."""
        for (start, outer), options in self.costs.items():
            for (t, d), seconds in options if start == inner else ():
                left = used - t * d, degrees - d
                if min(left) >= 0 and max(seconds[degrees], self.values[outer][left]) <= value:
                    return Stage(self.family.sets[outer], t, d, float(seconds[degrees])), outer
        raise AssertionError("a value without a stage that leads to it")


def _choices(ways: Ways, nodes: np.ndarray) -> tuple[Floats, Floats, Floats]:
    """Seconds more, and what goes from a and b, of every choice of nodes to recompute that may be best."""
    kinds: dict[tuple[float, float], list[float]] = defaultdict(list)
    for node in nodes:
        if ways.freed_a[node] > 0 or ways.freed_b[node] > 0:
            kinds[float(ways.freed_a[node]), float(ways.freed_b[node])].append(float(ways.extra_s[node]))
    if prod(len(each) + 1 for each in kinds.values()) > _MOST_CHOICES:
        raise UsageError(f"more than {_MOST_CHOICES} choices of nodes to recompute: too many kinds of nodes")
    sums = [np.concatenate([[0.0], np.cumsum(sorted(each))]) for each in kinds.values()]
    counts = np.array([*product(*(range(len(each)) for each in sums))], dtype=np.intp).reshape(-1, len(kinds))
    freed = np.array([*kinds], dtype=np.float64).reshape(-1, 2)
    extra = np.zeros(len(counts))
    for column, each in enumerate(sums):
        extra += each[counts[:, column]]
    gone = counts @ freed
    return extra, gone[:, 0], gone[:, 1]


def read(path: Path) -> Problem:
    """The problem of a file. Raises UsageError where ways differ in more than seconds and memory."""
    content = json.loads(path.read_text())
    numbers = {node["id"]: number for number, node in enumerate(content["nodes"])}
    edges = [(numbers[e["sourceId"]], numbers[e["destId"]], e["communicationCost"]) for e in content["edges"]]
    degrees = sorted(set.intersection(*({int(t) for t in node["TMPCs"]} for node in content["nodes"])))
    ids = [str(node["id"]) for node in content["nodes"]]
    ways = {t: _ways([node["TMPCs"][str(t)] for node in content["nodes"]], edges, ids) for t in degrees}
    dag = Dag(len(numbers), tuple((a, b) for a, b, _ in edges))
    cluster = content["maxDevices"], content["maxMemoryPerDevice"], content["bandwidth"]
    return Problem(dag, tuple(ids), ways, content["mbsInBatch"], *cluster)


def _ways(nodes: list[list[dict[str, Any]]], edges: list[tuple[int, int, float]], ids: list[str]) -> Ways:
    kept = [min(ways, key=lambda way: way["timePerSample"]) for ways in nodes]
    other = [max(ways, key=lambda way: way["timePerSample"]) for ways in nodes]
    for ways, first in zip(nodes, kept, strict=True):
        if len(ways) > 2 or any(way[key] != first[key] for way in ways for key in _SAME_KEYS):
            raise UsageError("a node has more than two ways, or ways that differ in more than seconds and memory")

    def column(ways: list[dict[str, Any]], key: str) -> Floats:
        return np.array([way[key] for way in ways], dtype=np.float64)

    def change(key: str) -> Floats:
        return column(other, key) - column(kept, key)

    crossing = [
        Value(a, (b,), size + kept[a]["syncTimeBw"][ids[b]], size + kept[b]["syncTimeFw"][ids[a]])
        for a, b, size in edges
    ]
    return Ways(
        column(kept, "timePerSample"),
        column(kept, "parameterSize"),
        column(kept, "memoryUsageA"),
        column(kept, "memoryUsageB"),
        change("timePerSample"),
        -change("memoryUsageA"),
        -change("memoryUsageB"),
        tuple(crossing),
    )


_SAME_KEYS = ("parameterSize", "syncTimeFw", "syncTimeBw")
