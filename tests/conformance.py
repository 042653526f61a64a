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
def shapes(draw: st.DrawFn, kind: Kind) -> Shape:
    """A shape that the schedule takes, with uneven hops."""
    numbers = kind.stages_per_rank or (1, 2, 3, 4)
    ranks, batches = draw(st.integers(1, 6)), draw(st.integers(1, 10))
    placement = kind.place(ranks, draw(st.sampled_from(numbers)))
    seconds = draw(st.sampled_from([0.0, 0.1, 0.5]))
    hops = tuple(0.0 if a == b else seconds for a, b in pairwise(placement))
    part = draw(st.sampled_from([1.0, 0.4]))
    return Shape(ranks, batches, placement, hops, part)


@st.composite
def instances(draw: st.DrawFn, kind: Kind) -> Instance:
    """A table with what its stages cost: equal times, or uneven ones; one unit held from F to W in each rank."""
    shape = draw(shapes(kind).filter(lambda shape: not kind.refuses(shape)))
    second = st.just(1.0) if draw(st.booleans()) else st.floats(0.1, 3.0)
    times = [
        StageTimes(draw(second), 0.0, draw(second), draw(second))._replace(backward_s=2.0) for _ in shape.placement
    ]
    table = Schedule(kind.name, shape.placement, kind.make(shape, times))
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
    return sum(s.forward_s + min(s.backward_s, s.input_grad_s) for s in stages)


def work_s(table: Schedule, stages: Sequence[StageCost]) -> float:
    """The longest that any rank computes."""
    seconds = [0.0] * table.ranks
    for rank, row in enumerate(table.order):
        for action in row:
            seconds[rank] += dict(zip("FBIW", stages[action.stage].times, strict=True))[action.op.value]
    return max(seconds)
