"""What a schedule does with these stages over these links: when every action runs, and what every rank holds.

When actions end is their graph's matter (autopipe/graph.py), what ranks hold that of the loads (autopipe/loads.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.core.cluster import Link
from autopipe.core.in_flight import Kept
from autopipe.core.plan import Plan
from autopipe.core.schedule import Action, Op, Schedule, stages_on
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Span, Timeline
from autopipe.graph import Costs, Floats, Graph, costs_of
from autopipe.loads import memory_curves


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    hops: Sequence[Link | None],
    *,
    overhead_s: float = 0.0,
    memory: str = "profile",
    graph: Graph | None = None,
    crossing: Sequence[Kept] = (),
) -> Timeline:
    """The Timeline of one step, or of some periods of an asynchronous table's steady part; replicas are all alike.

    ``stages[s]`` is what stage s costs, ``hops[s]`` the link from stage s to s + 1, None inside a rank. Every action
    of the table takes ``overhead_s`` beyond its stage's seconds. At the end each rank waits ``reduce_s`` for the
    gradients of its stages, and runs the optimizer of each, ``Action(stage, Op.O, 0)``. A rank holds its stages'
    lasting bytes, all versions of their weights, and what is received and sent throughout; for each micro-batch from
    the end of F what F keeps, from the end of I what I leaves, and nothing from the end of B or W; a stage's gradients
    from its first W or the end of its first B; and its stage's workspace while an action runs. In a first B gradients
    take the place of activations (see StageCost).
    ``memory`` names a model of what I leaves, see StageCost.under. A table without backwards is for evaluation: nothing
    is kept, no optimizer runs. ``graph`` and ``crossing`` (in_flight.kept) are the schedule's, if already there.
    Raises ScheduleError where actions wait for each other.
    """
    graph = graph or Graph.of(schedule)
    costs = costs_of(stages, hops, overhead_s)
    ends = graph.ends(costs)
    rows = [_spans(schedule, graph, rank, stages, costs, ends) for rank in range(schedule.ranks)]
    held = [stage.under(memory) for stage in stages]
    spans = sorted((span for row in rows for span in row), key=lambda span: (span.start_s, span.rank, span.end_s))
    curves = memory_curves(schedule, held, rows, crossing)
    if schedule.asynchronous:
        first, last, updates = graph.window
        start, end = float(ends[first[0], 0]), float(ends[last[0], 0])
        line = Timeline(schedule.ranks, tuple(spans), curves, (end - start) / updates, updates=updates)
        return line.between(start, end)
    return Timeline(schedule.ranks, tuple(spans), curves, max(span.end_s for span in spans))


def simulate_plan(plan: Plan) -> Timeline:
    """The Timeline that a plan is expected to give."""
    costs = [stage.costs for stage in plan.stages]
    return simulate(plan.schedule.parsed(), costs, plan.hops, overhead_s=plan.overhead_s)


def _spans(
    schedule: Schedule, graph: Graph, rank: int, stages: Sequence[StageCost], costs: Costs, ends: Floats
) -> list[Span]:
    spans = []
    now = 0.0
    seconds_of = [*costs.actions_s[:, 0], *costs.optimizer_s[:, 0]]
    for action, row in zip(schedule.order[rank], graph.rows[rank], strict=True):
        seconds = float(seconds_of[graph.costs[row]])
        start, now = now, float(ends[row, 0])
        spans.append(Span(rank, action, max(start, now - seconds), now))
    own = stages_on(schedule.placement, rank) if schedule.trains and not schedule.asynchronous else ()
    now += sum(stages[stage].reduce_s for stage in own)
    for stage in own:
        start, now = now, now + stages[stage].optimizer_s
        spans.append(Span(rank, Action(stage, Op.O, 0), start, now))
    return spans
