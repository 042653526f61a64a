"""What every registered schedule must do, drawn at random: shapes, uneven times, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

import autopipe.synthesis  # noqa: F401
from autopipe.core.cluster import Link
from autopipe.core.schedule import Kind, Op, Schedule, Shape, StageTimes
from autopipe.core.stage import StageCost
from tests.synthetic import stage


class Instance(NamedTuple):
    """A schedule's table for stages and hops."""

    table: Schedule
    shape: Shape
    stages: list[StageCost]
    hops: list[Link | None]


@st.composite
def shapes(draw: st.DrawFn, kind: Kind, *, taken: bool = False) -> Shape:
    """A shape with uneven hops; with ``taken`` one that the schedule takes."""
    number = draw(st.sampled_from(kind.stages_per_rank or (1, 2, 3, 4)))
    sizes = [
        (ranks, batches)
        for ranks in range(1, 7)
        for batches in range(1, 11)
        if not (taken and kind.refuses(Shape(ranks, batches, kind.place(ranks, number))))
    ]
    ranks, batches = draw(st.sampled_from(sizes))
    placement = kind.place(ranks, number)
    seconds = draw(st.sampled_from([0.0, 0.1, 0.5]))
    hops = tuple(0.0 if a == b else seconds for a, b in pairwise(placement))
    part = draw(st.sampled_from([1.0, 0.4]))
    return Shape(ranks, batches, placement, hops, part)


@st.composite
def instances(draw: st.DrawFn, kind: Kind) -> Instance:
    """A table with what its stages cost: equal times, or uneven ones; one unit held from F to W in each rank."""
    shape = draw(shapes(kind, taken=True))
    second = st.just(1.0) if draw(st.booleans()) else st.floats(0.1, 3.0)
    times = [
        StageTimes(draw(second), 0.0, draw(second), draw(second))._replace(backward_s=2.0) for _ in shape.placement
    ]
    table = kind.table(shape, times)
    stages = [
        stage(t.forward_s, t.backward_s, input_grad_s=t.input_grad_s, weight_grad_s=t.weight_grad_s, send=1)
        for t in times
    ]
    hops = [
        None if a == b else Link(0.0, 1 / max(seconds, 1e-12))
        for (a, b), seconds in zip(pairwise(shape.placement), shape.hops_s, strict=True)
    ]
    return Instance(table, shape, stages, hops)


def peaks(table: Schedule) -> list[float]:
    """The most micro-batches whose activations a rank holds from F to B or W, one for all its stages."""
    result = []
    for rank, row in enumerate(table.order):
        held = most = 0
        for action in row:
            held += (action.op is Op.F) - (action.op in (Op.B, Op.W))
            most = max(most, held)
        result.append(most / table.placement.count(rank))
    return result


def chain_s(stages: Sequence[StageCost], table: Schedule) -> float:
    """The way of one micro-batch, with no transfers: no schedule can be faster."""
    length = len(stages) // table.ways
    ways = [range(k * length, (k + 1) * length) for k in range(table.ways)]
    both = [s.forward_s + min(s.backward_s, s.input_grad_s) for s in stages]
    return min(sum(both[s] for s in way) for way in ways)


def work_s(table: Schedule, stages: Sequence[StageCost]) -> float:
    """The longest that any rank computes."""
    seconds = [0.0] * table.ranks
    for rank, row in enumerate(table.order):
        for action in row:
            seconds[rank] += dict(zip("FBIWO", (*stages[action.stage].times, 0.0), strict=True))[action.op.value]
    return max(seconds)
