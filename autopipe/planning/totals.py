"""A step's totals without its spans: a plan says no more of a table, which may have a quarter of a million actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopipe.core.schedule import stages_on
from autopipe.core.stage import StageCost
from autopipe.graph import Costs, Floats, Graph


class Totals(NamedTuple):
    """The seconds of a step, and those in which each rank works, as its Timeline says."""

    step_s: float
    works_s: tuple[float, ...]

    @property
    def idle(self) -> float:
        """1 − work / (ranks × step)."""
        total = len(self.works_s) * self.step_s
        return 1 - sum(self.works_s) / total if total else 0.0


def totals(graph: Graph, stages: Sequence[StageCost], costs: Costs) -> Totals:
    """The totals of a table that flushes; ``costs`` are one candidate's, made of these stages."""
    ends_s, seconds = graph.ends(costs)[:, 0], costs.actions_s[graph.costs, 0]
    ranks = [
        _rank(ends_s[rows], seconds[rows], [stages[stage] for stage in stages_on(graph.placement, rank)])
        for rank, rows in enumerate(graph.rows)
    ]
    return Totals(max(end_s for end_s, _ in ranks), tuple(work_s for _, work_s in ranks))


def _rank(ends_s: Floats, seconds: Floats, own: Sequence[StageCost]) -> tuple[float, float]:
    """When a rank is done, and how long it works: its row, then the optimizer of each stage."""
    begins_s = np.maximum(np.concatenate([[0.0], ends_s[:-1]]), ends_s - seconds)
    reduced_s = ends_s[-1] + sum(stage.reduce_s for stage in own)
    steps_s = np.add.accumulate([reduced_s, *(stage.optimizer_s for stage in own)])
    worked_s = np.add.accumulate(np.concatenate([ends_s - begins_s, np.diff(steps_s)]))
    return float(steps_s[-1]), float(worked_s[-1])
