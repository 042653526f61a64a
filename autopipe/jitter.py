"""What a step takes beyond its timeline because equal actions do not take equal times.

A timeline has every action take its median. On a real machine each takes a little more or less, and an action waits for
the later of two others: so the more evenly the work is split, the more of the unevenness adds to the step, and none of
it is won back. Here steps are drawn: an action of d seconds is d / piece_s pieces, each with a part of its own out of
the profile's jitter. The profile met that with every rank busy, and ranks disturb each other only while they compute:
an action's deviation counts by how much of the step the other ranks work. The median of the draws is what is expected;
of several replicas, which wait for each other, the median of the latest one.
"""

from __future__ import annotations

import numpy as np

from autopipe.core.profile import Jitter
from autopipe.core.timeline import Timeline
from autopipe.graph import Costs, Floats, Graph

_DRAWS = 64
_FEWEST = 16
_NUMBERS = 4_000_000
"""Numbers that are drawn at most: fewer steps of long tables, whose steps differ less."""

_SEED = 0
"""Equal plans have equal predictions."""


def jitter_s(jitter: Jitter, graph: Graph, costs: Costs, timeline: Timeline, replicas: int = 1) -> float:
    """The seconds that the median of uneven steps takes beyond ``timeline``, which is that of ``graph`` and ``costs``.

    0 on a single device: nobody was there to disturb it.
    """
    if timeline.ranks * replicas < 2:
        return 0.0
    steps = graph.uneven_steps(costs, _factors(jitter, graph, costs.actions_s[:, 0], timeline, replicas))
    latest = 0.5 ** (1 / replicas)  # all replicas are done by then in half of the steps
    return max(0.0, float(np.quantile(steps, latest)) - timeline.step_s)


def _factors(jitter: Jitter, graph: Graph, actions_s: Floats, timeline: Timeline, replicas: int) -> Floats:
    """For each row of the graph and each draw what its action takes, as a part of its median."""
    draws = max(_FEWEST, min(_DRAWS, _NUMBERS // len(graph.costs)))
    generator = np.random.default_rng(_SEED)
    parts = np.array(jitter.parts)
    even = np.full(len(parts), 1 / len(parts))
    known = np.append(actions_s, 0.0)  # optimizer steps of asynchronous tables are taken as even
    seconds = known[np.minimum(graph.costs, len(actions_s))]
    pieces = np.maximum(1, np.rint(seconds / jitter.piece_s)).astype(np.intp)[:, None]
    factors = np.ones((len(graph.costs), draws))
    for rank, rows in enumerate(graph.rows):
        drawn = generator.multinomial(pieces[rows], even, size=(len(rows), draws)) @ parts / pieces[rows]
        factors[rows] += _others_busy(timeline, rank, replicas) * (drawn - 1)
    return factors


def _others_busy(timeline: Timeline, rank: int, replicas: int) -> float:
    """The part of the step in which another rank works, on average, those of the other replicas too."""
    busy = [1 - timeline.rank_idle(each) for each in range(timeline.ranks)]
    return (replicas * sum(busy) - busy[rank]) / (replicas * timeline.ranks - 1)
