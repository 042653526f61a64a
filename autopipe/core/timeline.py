"""A Timeline: what every rank does, when, and what it holds meanwhile. Predicted and measured are this one type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from autopipe.core.schedule import Action


class Span(NamedTuple):
    """One action on one rank. The step's first forward starts at 0."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Memory(NamedTuple):
    """A rank holds ``bytes`` from ``time_s`` on."""

    time_s: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """The spans of one step in order of their start, and each rank's memory curve.

    ``step_s`` runs from the first forward to the end of the last rank's optimizer step. An asynchronous pipeline has no
    such step: there it is the period, from one update to the next, and the spans are those of ``updates`` periods.
    ``origin`` is ``predicted`` or ``measured``.
    """

    ranks: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[Memory, ...], ...]
    step_s: float
    origin: str = "predicted"
    updates: int = 1

    @classmethod
    def of_ranks(
        cls, parts: Sequence[Sequence[Span]], origin: str, memory: tuple[tuple[Memory, ...], ...] | None = None
    ) -> Timeline:
        """What the ranks' own clocks recorded, as a step from 0; without memory curves where none is given."""
        first = min(span.start_s for part in parts for span in part)
        spans = [s._replace(start_s=s.start_s - first, end_s=s.end_s - first) for part in parts for s in part]
        ordered = sorted(spans, key=lambda span: (span.start_s, span.rank))
        curves = ((),) * len(parts) if memory is None else memory
        return cls(len(parts), tuple(ordered), curves, max(span.end_s for span in spans), origin=origin)

    def work_s(self, rank: int) -> float:
        """Seconds of a step in which a rank computes."""
        return self._works_s[rank] / self.updates

    @cached_property
    def _works_s(self) -> tuple[float, ...]:
        """The seconds of each rank's spans, in one pass over all of them."""
        seconds: list[list[float]] = [[] for _ in range(self.ranks)]
        for rank, _, start_s, end_s in self.spans:
            seconds[rank].append(end_s - start_s)
        return tuple(map(sum, seconds))

    @property
    def idle(self) -> float:
        """1 − work / (ranks × step)."""
        total = self.ranks * self.step_s
        return 1 - sum(self.work_s(rank) for rank in range(self.ranks)) / total if total else 0.0

    def rank_idle(self, rank: int) -> float:
        """The part of the step in which one rank does not compute."""
        return 1 - self.work_s(rank) / self.step_s if self.step_s else 0.0

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each rank holds."""
        return tuple(max((point.bytes for point in curve), default=0) for curve in self.memory)

    def between(self, start_s: float, end_s: float) -> Timeline:
        """The part of the spans that start in that time, and of the memory curves; its start is the moment 0."""
        spans = (span for span in self.spans if start_s <= span.start_s < end_s)
        moved = tuple(s._replace(start_s=s.start_s - start_s, end_s=s.end_s - start_s) for s in spans)
        return replace(self, spans=moved, memory=tuple(_cut(curve, start_s, end_s) for curve in self.memory))


def _cut(curve: tuple[Memory, ...], start_s: float, end_s: float) -> tuple[Memory, ...]:
    """The curve in that time, from what it is at its start on."""
    before = [point for point in curve if point.time_s <= start_s]
    inside = [point._replace(time_s=point.time_s - start_s) for point in curve if start_s < point.time_s < end_s]
    return (*(point._replace(time_s=0.0) for point in before[-1:]), *inside)
