"""Rules for list scheduling that have proved useful, and the choice of the best order among several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import floor, inf

from autopipe.core.schedule import Shape, StageMemory, StageTimes
from autopipe.ordering.compiled import has_numba
from autopipe.ordering.listing import Rules, listed
from autopipe.ordering.rows import Listed

FILLS = (0.0, 0.5, 1.0)
MANY = 100_000
"""From so many actions on the loops are compiled where numba is installed, below only where it is loaded already."""

FIRST = -1e12
"""A key that is more urgent than any other."""


def way_keys(
    shape: Shape, times: Sequence[StageTimes], stretches: Sequence[float] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Keys after the way of one micro-batch: when it reaches each stage's F, and on its way back each I.

    ``stretches`` draw the way out: one for each pass over the ranks, forward ones first, then the backward ones.
    """
    hops = [*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0]
    passes = -(-shape.stages // shape.ranks)
    factors = stretches or (1.0,) * (2 * passes)
    there = [factors[s // shape.ranks] * (t.forward_s + hops[s]) for s, t in enumerate(times)]
    heads = [*accumulate(there, initial=0.0)]
    back, now = [0.0] * shape.stages, heads[-1]
    for s in reversed(range(shape.stages)):
        back[s] = now
        now += factors[2 * passes - 1 - s // shape.ranks] * (times[s].input_grad_s + (hops[s - 1] if s else 0.0))
    return tuple(heads[:-1]), tuple(back)


def period_s(shape: Shape, times: Sequence[StageTimes]) -> float:
    """The most that one micro-batch takes of a rank."""
    work = [0.0] * shape.ranks
    for rank, t in zip(shape.placement, times, strict=True):
        work[rank] += t.forward_s + t.input_grad_s + t.weight_grad_s
    return max(work) or 1.0


def backward_first(shape: Shape, most: Sequence[float] = ()) -> Iterator[Rules]:
    """I before F, the deepest stage before others, so that gradients get back soon."""
    forwards = tuple(-float(stage) for stage in range(shape.stages))
    backs = tuple(FIRST - stage for stage in range(shape.stages))
    for fill in FILLS:
        for balance in (False, True):
            yield Rules(forwards, backs, 1e-6, fill=fill, balance=balance, most=tuple(most))


def in_turn(shape: Shape, ahead: Sequence[float]) -> Iterator[Rules]:
    """One F, one I in turn, from when ``ahead`` micro-batches of a stage are between the two."""
    forwards, backs = tuple(-float(a) for a in ahead), (-0.5,) * shape.stages
    for fill in FILLS:
        for balance in (False, True):
            yield Rules(forwards, backs, 1.0, fill=fill, balance=balance, strict=True, pull=-1.0)


def room(shape: Shape, times: Sequence[StageTimes], share: float) -> tuple[float, ...]:
    """How many forwards of each stage fit between the first one and its gradient, rounded up from 1 − share."""
    forwards, backs = way_keys(shape, times)
    spans = [
        (back - f) / t.forward_s if t.forward_s else inf for f, back, t in zip(forwards, backs, times, strict=True)
    ]
    return tuple(max(1.0, floor(span + share) if span < inf else span) for span in spans)


def best(shape: Shape, times: Sequence[StageTimes], memory: StageMemory, rules: Sequence[Rules]) -> Listed | None:
    """Of the rules' orders the one with the least makespan plus longest stage time; None where none fits."""
    many = len(rules) * shape.stages * shape.micro_batches > MANY
    fast = has_numba(loaded=not many)
    made = (listed(shape, times, memory, each, fast=fast) for each in rules)
    return min((one for one in made if one), key=lambda one: one.makespan_s + one.stage_time_s, default=None)


def fit(
    shape: Shape, times: Sequence[StageTimes], cap: float, rules: Sequence[Rules], *, held: float | None = None
) -> Listed:
    """The best order under the cap, or under the least one with which any of the rules gets through.

    ``held`` is the part of the activations that is held between I and W, by default the shape's.
    """
    kept = shape if held is None else replace(shape, weight_part=held)
    while True:
        found = best(shape, times, StageMemory.of(kept, cap), rules)
        if found:
            return found
        cap += 0.5
