"""List scheduling of a two-way pipeline: every rank, whenever it is free, takes the most urgent action that is there.

Two replicas of the model share the ranks. Each keeps its micro-batches in their order, as 1F1B does, and what is left
to decide is whose turn it is. Stage s < p is part s of the replica that begins on rank 0, p + s that of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopipe.core.schedule import Action, Op, Order, Shape, StageTimes

Urgency = Callable[[int, Op, int], float]
"""Of a part, an operation and a micro-batch's number within its replica; the least is the most urgent."""


class Listed(NamedTuple):
    """An order, and its makespan in the times that it was made for."""

    makespan_s: float
    order: Order


def listed(
    shape: Shape, times: Sequence[StageTimes], ways: Sequence[Sequence[int]], cap: int, together: int, urgency: Urgency
) -> Listed | None:
    """The order of these micro-batches, a list for each replica; None where the cap brings it to a standstill.

    A rank holds at most ``cap`` micro-batches. ``together`` forwards of a replica follow one another on a rank.
    """
    state = _State(shape, times, ways, cap, together, urgency)
    while state.left:
        options = [option for stage in range(shape.stages) for option in state.options(stage)]
        if not options:
            return None
        state.run(min(options))
    return Listed(max(state.free), tuple(map(tuple, state.rows)))


class _Option(NamedTuple):
    """An action that could run next, the earliest and then the most urgent first."""

    start_s: float
    urgency: float
    stage: int
    op: Op


class _State:
    """What has run so far: per stage how many F and B, per rank its row, when it is free, and what it holds."""

    def __init__(
        self,
        shape: Shape,
        times: Sequence[StageTimes],
        ways: Sequence[Sequence[int]],
        cap: int,
        together: int,
        urgency: Urgency,
    ) -> None:
        self.shape, self.times, self.ways = shape, times, ways
        self.cap, self.together, self.urgency = cap, together, urgency
        self.hops = [*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0]
        self.counts = {op: [0] * shape.stages for op in (Op.F, Op.B)}
        self.ends: dict[Action, float] = {}
        self.free = [0.0] * shape.ranks
        self.held = [0] * shape.ranks
        self.rows: list[list[Action]] = [[] for _ in range(shape.ranks)]
        self.left = 2 * shape.ranks * sum(map(len, ways))

    def options(self, stage: int) -> list[_Option]:
        """The stage's next F and its next B, as far as their values are there."""
        rank, part, way = self.shape.placement[stage], stage % self.shape.ranks, self.ways[stage // self.shape.ranks]
        found = []
        for op in (Op.F, Op.B):
            number = self.counts[op][stage]
            if number == (len(way) if op is Op.F else self.counts[Op.F][stage]):
                continue
            arrives = self._arrives(stage, op, way[number])
            second = op is Op.F and self._half_done(rank, stage)
            if arrives is not None and (op is Op.B or second or self.held[rank] + self.together <= self.cap):
                urgency = float("-inf") if second else self.urgency(part, op, number)
                found.append(_Option(max(self.free[rank], arrives), urgency, stage, op))
        return found

    def _half_done(self, rank: int, stage: int) -> bool:
        """Whether the rank has begun forwards of the stage that belong together."""
        row = self.rows[rank]
        return bool(row and row[-1][:2] == (stage, Op.F) and self.counts[Op.F][stage] % self.together)

    def _arrives(self, stage: int, op: Op, batch: int) -> float | None:
        """When what an action needs is there; None where nothing has made it yet."""
        part = stage % self.shape.ranks
        if op is Op.F:
            if part == 0:
                return 0.0
            made, hop = self.ends.get(Action(stage - 1, Op.F, batch)), self.hops[stage - 1]
        elif part == self.shape.ranks - 1:
            return self.ends[Action(stage, Op.F, batch)]
        else:
            made, hop = self.ends.get(Action(stage + 1, Op.B, batch)), self.hops[stage]
        return None if made is None else made + hop

    def run(self, option: _Option) -> None:
        """Add the action to its rank's row."""
        start, _, stage, op = option
        rank = self.shape.placement[stage]
        action = Action(stage, op, self.ways[stage // self.shape.ranks][self.counts[op][stage]])
        seconds = self.times[stage].forward_s if op is Op.F else self.times[stage].backward_s
        self.free[rank] = self.ends[action] = start + seconds
        self.rows[rank].append(action)
        self.counts[op][stage] += 1
        self.held[rank] += 1 if op is Op.F else -1
        self.left -= 1
