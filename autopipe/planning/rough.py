"""A case as the solvers see it: each part's work, its hops, and the step as Σ + (m − 1) · max.

From it come the splits that moving cuts begins from, and the order in which moves are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.planning.ladder import Floats
from autopipe.planning.outline import Outline
from autopipe.planning.tables import Tables
from autopipe.solvers.chain_dp import smallest_maximum, smallest_step

Positions = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Rough:
    """The parts' tables; of the stages that hold the same part the largest value."""

    outline: Outline
    tables: Tables

    def solved(self, least_ends: Floats | None) -> list[tuple[int, ...]]:
        """The splits with the least longest stage, the least bound where that is given, and the least step."""
        work = np.where(by_part(self.outline, ~self.tables.allowed), np.inf, self._work)
        hops = np.zeros_like(work)
        hops[:-1] = self._hops[: self.outline.parts - 1, :, None]
        found = [smallest_maximum(work), smallest_step(work, hops, self._repeats)]
        if least_ends is not None:
            found.insert(1, smallest_maximum(np.where(self.tables.allowed, least_ends, np.inf)))
        return [split.positions for split in found if split]

    def steps(self, splits: Positions) -> Floats:
        """The ticks of Σ + (m − 1) · max of many splits."""
        begin, end, part = splits[:, :-1], splits[:, 1:], np.arange(self.outline.parts)
        work = self._work[part, end, begin - end + self.tables.reach]
        hops = self._hops[part[:-1], end[:, :-1]].sum(axis=1)
        return np.asarray(work.sum(axis=1) + hops + self._repeats * work.max(axis=1))

    @cached_property
    def _work(self) -> Floats:
        """Ticks that a part spends on one micro-batch, on average over its row, a band of as many parts."""
        work = np.zeros(self.tables.open.shape)
        for op, ticks in enumerate(self.tables.actions):
            counts = np.array([row.counts[op] for row in self.outline.rows], np.float64)
            if counts.any():
                work += counts[:, None, None] * ticks
        return by_part(self.outline, work) * (self.outline.ways / self.outline.micro_batches)

    @property
    def _repeats(self) -> int:
        """How often the longest stage runs beyond the first micro-batch, in all updates of an asynchronous table."""
        return self.outline.micro_batches * self.outline.updates - 1

    @property
    def _hops(self) -> Floats:
        """Ticks that a micro-batch and its gradient spend on each hop, by the cut; shape (stages − 1, n + 1)."""
        return self.tables.activations + self.tables.gradients


def by_part(outline: Outline, values: NDArray[Any]) -> NDArray[Any]:
    """Of the stages that hold the same part of the model the largest value."""
    if outline.ways == 1:
        return values
    return np.asarray(values.reshape(outline.ways, outline.parts, *values.shape[1:]).max(axis=0))
