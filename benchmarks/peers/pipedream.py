"""The profiles of PipeDream (SOSP 2019), and the objective of its hierarchical optimizer.

A file has a line for each node, ``id -- description -- forward_compute_time=ms, backward_compute_time=ms,
activation_size=bytes, parameter_size=bytes``, then for each edge a tab and ``from -- to``. Inputs and unread items of
tuples are left out.

A stage of T seconds and P parameter bytes on r machines takes (T + 4 (r − 1) P / (B r)) / r, and transfers of
2 a / (B r) at either boundary overlap with it, a the activations over it; the first stage does not count its output,
which the second one counts as its input. The stages lie between states: ideals that grow from the first source by one
successor, and what that needs, at a time. What a boundary is charged for is PipeDream's: the state's last nodes and
what these need and also feeds something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.solvers.graph_dp import Answer, Costs, Option, best_order, smallest_longest
from autopipe.solvers.ideals import Dag, Family, Flags, Floats, Indices, prefixes

_MOST_STATES = 1000
"""Levels are solved between every two states: above so many that takes too long."""


class Level(NamedTuple):
    """So many machines (or groups of the level below), joined at so many bytes a second."""

    machines: int
    bytes_per_s: float


@dataclass(frozen=True, eq=False)
class Profile:
    """A graph without its inputs; per node seconds of forward and backward, and bytes."""

    dag: Dag
    names: tuple[str, ...]
    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats

    @cached_property
    def states(self) -> list[int]:
        """The ideals that PipeDream cuts at."""
        feeds = [sum(1 << target for target in each) for each in self.dag.feeds]
        first = next(below for below, needs in zip(self._below, self.dag.needs, strict=True) if not needs)
        borders = {first: feeds[first.bit_length() - 1]}
        queue = [first]
        for held in queue:
            border, borders[held] = borders[held], 0
            for node in _nodes(border):
                larger = held | self._below[node]
                if larger not in borders:
                    grown = border
                    for new in _nodes(larger & ~held):
                        grown |= feeds[new]
                    borders[larger] = grown & ~larger
                    queue.append(larger)
        return queue

    @cached_property
    def _below(self) -> list[int]:
        """Of each node, the node and all that it needs."""
        below = [0] * self.dag.nodes
        for node in next(self.dag.orders(1)):
            below[node] = 1 << node
            for need in _nodes(self.dag.needs[node]):
                below[node] |= below[need]
        return below

    def boundary_bytes(self, members: Flags) -> Floats:
        """The activations that PipeDream counts behind each ideal, given its nodes, shape (ideals, nodes)."""
        result = np.zeros(len(members))
        last = members.copy()
        for node, targets in enumerate(self.dag.feeds):
            for target in targets:
                last[:, node] &= ~members[:, target]
        counted = last.copy()
        for node, below in enumerate(self._below):
            for need in _nodes(below & ~(1 << node)):
                if any(not below >> target & 1 for target in self.dag.feeds[need]):
                    counted[:, need] |= last[:, node]
        for node, size in enumerate(self.activation_bytes):
            result += counted[:, node] * size
        return result

    def costs(self, level: Level, family: Family) -> Costs:
        """What stages take on the machines of one level; option r − 1 has r of them."""
        compute, parameters = (family.members @ each for each in (self.compute_s, self.parameter_bytes))
        sent = 2 * self.boundary_bytes(family.members) / level.bytes_per_s
        sent[-1] = 0.0

        def costs(option: int, inner: Indices, outer: Indices) -> Floats:
            count = option + 1
            work = compute[None, outer] - compute[inner, None]
            reduced = 4 * option / (level.bytes_per_s * count) * (parameters[None, outer] - parameters[inner, None])
            boundaries = np.maximum(sent[inner, None], sent[None, outer]) / count
            return np.maximum((work + reduced) / count, np.where(inner[:, None] > 0, boundaries, 0.0))

        return costs

    def solve(self, level: Level, *, replicas: int, linear: bool, seconds: float) -> Answer | None:
        """The smallest longest stage on one level, with at most so many replicas of a stage."""
        reduced = 4 * self.parameter_bytes / level.bytes_per_s
        options = [
            Option(0, (self.compute_s + reduced * (count - 1) / count) / count, count)
            for count in range(1, min(replicas, level.machines) + 1)
        ]

        def costs(family: Family) -> Costs:
            return self.costs(level, family)

        if linear:
            return best_order(self.dag, options, [level.machines], costs, sets=self.states)
        return smallest_longest(self.dag, options, [level.machines], costs, sets=self.states, seconds=seconds)

    @property
    def order(self) -> list[int]:
        """The states along the linear order that has most of them."""
        states = set(self.states)
        return max(([each for each in prefixes(order) if each in states] for order in self.dag.orders(12)), key=len)


class Nested(NamedTuple):
    """What hierarchical stages reach, and what none can beat; the ideals between the stages of the outermost level,
    and on how many of its groups each stage runs."""

    value: float
    lower_bound: float
    sets: tuple[int, ...]
    groups: tuple[int, ...]


def solve_levels(profile: Profile, levels: Sequence[Level], *, linear: bool) -> Nested:
    """The smallest longest stage where each machine of a level is a whole pipeline of the level below.

    The first stage of a level shares its reduction among the machines within, as PipeDream has it.
    """
    sets = profile.order if linear else profile.states
    if len(sets) > _MOST_STATES:
        raise UsageError(f"levels take at most {_MOST_STATES} states, there are {len(sets)}: use --order linear")
    family = Family({0, *sets}, profile.dag.nodes, profile.compute_s)
    numbers = np.arange(len(family))
    inside = family.contained(numbers, numbers) & (numbers[:, None] < numbers)
    compute, parameters = (family.members @ each for each in (profile.compute_s, profile.parameter_bytes))
    between = np.where(inside, compute[None] - compute[:, None], np.inf)
    sent = 2 * profile.boundary_bytes(family.members)
    sent[-1] = 0.0
    within = 1
    for depth, level in enumerate(levels):
        tables = _Level(between, parameters[None] - parameters[:, None], sent, level, within)
        values = tables.values(1 if depth == len(levels) - 1 else len(family))
        between, within = values[-1], level.machines
    positions, groups = tables.traced(values[:, 0])
    value, evenly = float(between[0, -1]), float(profile.compute_s.sum()) / prod(each.machines for each in levels)
    bound = min(evenly, value) if linear else value
    return Nested(value, bound, tuple(family.sets[i] for i in positions), groups)


class _Level:
    """One level: what the first and what later stages take on 1, 2, … of its machines, from and to each ideal."""

    def __init__(self, between: Floats, sizes: Floats, sent: Floats, level: Level, within: int) -> None:
        self.machines = level.machines
        firsts, stages = [], []
        for count in range(1, level.machines + 1):
            reduced = 4 * (count - 1) * sizes / (level.bytes_per_s * count)
            boundaries = np.maximum(sent[:, None], sent[None, :]) / (level.bytes_per_s * count)
            firsts.append((between + reduced / within) / count)
            stages.append(np.maximum((between + reduced) / count, boundaries))
        self.firsts, self.stages = np.stack(firsts), np.stack(stages)

    def values(self, starts: int) -> Floats:
        """The least longest stage on at most 1, 2, … machines, from each of the first ideals, to each ideal."""
        result = self.firsts[:, :starts].copy()
        for stop in range(1, result.shape[2]):
            rows = min(stop, starts)
            for machines in range(self.machines):
                found = result[machines, :rows, stop]
                if machines:
                    np.minimum(found, result[machines - 1, :rows, stop], out=found)
                for last in range(machines):
                    before = result[machines - last - 1, :rows, :stop]
                    joined = np.maximum(before, self.stages[last, :stop, stop])
                    np.minimum(found, joined.min(axis=1), out=found)
        return result

    def traced(self, values: Floats) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ideals between the stages from the first ideal to the last, and each stage's machines, as few as do."""
        positions, groups, best = [values.shape[1] - 1], [], values[-1, -1]
        machines = int((values[:, -1] <= best).argmax())
        while positions[-1]:
            stop = positions[-1]
            options = [(last, start) for last in range(machines) for start in range(1, stop)]
            good = (
                (last, start)
                for last, start in options
                if max(values[machines - last - 1, start], self.stages[last, start, stop]) <= best
            )
            last, start = (machines, 0) if self.firsts[machines, 0, stop] <= best else next(good)
            positions.append(start)
            groups.append(last + 1)
            machines -= last + 1
        return tuple(reversed(positions)), tuple(reversed(groups))


def _nodes(mask: int) -> Iterator[int]:
    """The nodes of a set, ascending."""
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<name>.*) -- "
    r"forward_compute_time=(?P<forward>[^,]+), backward_compute_time=(?P<backward>[^,]+), "
    r"activation_size=(?P<activations>\[[^]]*\]|[^,]+), parameter_size=(?P<parameters>[^, ]+)"
)


def read(path: Path) -> Profile:
    """The profile of a file. Raises UsageError for a line that is neither a node nor an edge."""
    nodes: dict[str, re.Match[str]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("\t"):
            source, _, target = line.strip().partition(" -- ")
            edges.append((source, target))
        elif line.strip():
            match = _NODE.match(line)
            if match is None:
                raise UsageError(f"{path}, line {number}: neither a node nor an edge: {line[:60]!r}")
            nodes[match["id"]] = match
    kept = _kept(nodes, edges)
    numbers = {name: number for number, name in enumerate(kept)}
    inside = [(numbers[a], numbers[b]) for a, b in edges if a in numbers and b in numbers]
    chosen = [nodes[name] for name in kept]
    return Profile(
        Dag(len(kept), tuple(inside)),
        tuple(kept),
        np.array([(float(node["forward"]) + float(node["backward"])) / 1000 for node in chosen]),
        np.array([sum(map(float, node["activations"].strip("[]").split(";"))) for node in chosen]),
        np.array([float(node["parameters"]) for node in chosen]),
    )


def _kept(nodes: dict[str, re.Match[str]], edges: Sequence[tuple[str, str]]) -> list[str]:
    """The nodes without inputs and without items of tuples that nothing reads."""
    targets = {target for _, target in edges}
    kept = [each for each in nodes if each in targets or not nodes[each]["name"].startswith("Input")]
    sources = {source for source, target in edges if source in kept}
    return [each for each in kept if each in sources or not nodes[each]["name"].startswith("__getitem__")]
