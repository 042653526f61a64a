"""The sets of nodes of a DAG that the first stages of a pipeline can hold.

A set is an ideal (closed downwards): with a node it holds all nodes that the node needs. A contiguous split into
stages is a chain of ideals from the empty set to all nodes; a stage holds what one ideal has more than the one
before. Sets are whole numbers, bit v for node v.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopipe.core.errors import UsageError

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]

_TICKS = 2.0**40
"""Weights are counted in this part of their sum, so that sums are exact and never shrink when a set grows."""


@dataclass(frozen=True)
class Dag:
    """Nodes 0 … nodes − 1 and edges (from, to). Raises UsageError where the edges have a cycle."""

    nodes: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if len(self._order(max)) < self.nodes:
            raise UsageError(f"a graph of {self.nodes} nodes has a cycle: it cannot be cut into stages")

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """Of each node, the set of the nodes that have an edge to it."""
        masks = [0] * self.nodes
        for source, target in self.edges:
            masks[target] |= 1 << source
        return tuple(masks)

    @cached_property
    def feeds(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, the nodes that it has an edge to, ascending."""
        targets: list[set[int]] = [set() for _ in range(self.nodes)]
        for source, target in self.edges:
            targets[source].add(target)
        return tuple(tuple(sorted(each)) for each in targets)

    def orders(self, count: int) -> Iterator[list[int]]:
        """So many linear orders that respect the edges: depth first, breadth first, random ones; always the same."""
        chance = random.Random(0)
        first, last = (lambda ready: ready[0]), (lambda ready: ready[-1])
        rules: list[Callable[[Sequence[int]], int]] = [last, first, *[chance.choice] * count]
        yield from (self._order(rule) for rule in rules[:count])

    def _order(self, pick: Callable[[Sequence[int]], int]) -> list[int]:
        """A linear order; ``pick`` chooses among the nodes that can come next, the longest ready one first."""
        held, order = 0, []
        ready = [v for v, needs in enumerate(self.needs) if not needs]
        while ready:
            node = pick(ready)
            ready.remove(node)
            order.append(node)
            held |= 1 << node
            ready += [v for v in self.feeds[node] if not self.needs[v] & ~held]
        return order

    def ideals(self, most: int) -> list[int] | None:
        """All ideals; None where there are more than ``most``."""
        addable = {0: tuple(v for v, needs in enumerate(self.needs) if not needs)}
        found = [0]
        for held in found:
            ready = addable.pop(held)
            for node in ready:
                larger = held | 1 << node
                if larger not in addable:
                    new = (v for v in self.feeds[node] if not self.needs[v] & ~larger)
                    addable[larger] = (*(v for v in ready if v != node), *new)
                    found.append(larger)
            if len(found) > most:
                return None
        return found


def prefixes(order: Sequence[int]) -> list[int]:
    """The ideals of a linear order: its prefixes, the empty set first."""
    sets = [0]
    for node in order:
        sets.append(sets[-1] | 1 << node)
    return sets


class Family:
    """Some ideals, the empty set and all nodes among them, in the order of their weight.

    ``sets`` come lighter ones first, then smaller ones, then by number; so a set comes after all that it contains.
    ``weights`` are their sums of the nodes' weights; ``members[i, v]`` says whether set i holds node v.
    """

    def __init__(self, sets: Iterable[int], nodes: int, weights: Floats) -> None:
        unordered = sorted(set(sets))
        members = _members(unordered, nodes)
        tick = float(weights.sum()) / _TICKS or 1.0
        sums: Floats = members.astype(np.float64) @ np.rint(weights / tick) * tick
        order = np.lexsort((np.arange(len(sums)), members.sum(axis=1), sums))
        self.sets = [unordered[i] for i in order]
        self.weights: Floats = sums[order]
        self.members: Flags = members[order]
        padded = np.zeros((len(order), -nodes % 64 + nodes), dtype=bool)
        padded[:, :nodes] = self.members
        self._packed = np.packbits(padded, axis=1).view(np.uint64)

    def __len__(self) -> int:
        return len(self.sets)

    def contained(self, inner: Indices, outer: Indices) -> Flags:
        """Whether sets contain others, shape (inner, outer)."""
        small, large = self._packed[inner], self._packed[outer]
        result = np.ones((len(inner), len(outer)), dtype=bool)
        any_small, all_large = np.bitwise_or.reduce(small, axis=0), np.bitwise_and.reduce(large, axis=0)
        for word in np.flatnonzero(any_small & ~all_large):
            result &= (small[:, word, None] & ~large[None, :, word]) == 0
        return result


def _members(sets: Sequence[int], nodes: int) -> Flags:
    size = (nodes + 7) // 8
    raw = np.frombuffer(b"".join(each.to_bytes(size, "little") for each in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(len(sets), size), axis=1, bitorder="little")[:, :nodes].astype(bool)
