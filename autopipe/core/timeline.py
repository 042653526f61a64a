"""A Timeline: what every rank does, when, and what it holds meanwhile. Predicted and measured are this one type."""

from __future__ import annotations

from dataclasses import dataclass
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

    ``step_s`` runs from the first forward to the end of the last rank's optimizer step. ``origin`` is
    ``predicted`` or ``measured``.
    """

    ranks: int
    spans: tuple[Span, ...]
    memory: tuple[tuple[Memory, ...], ...]
    step_s: float
    origin: str = "predicted"

    def work_s(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(span.end_s - span.start_s for span in self.spans if span.rank == rank)

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
