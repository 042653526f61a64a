"""What no order of the actions can beat, for stages, hops and memory that are given.

A rank starts when the first micro-batch reaches it (its head), and must do all its work. Its weight gradients may come
last, but its last input gradient is followed by those of the stages before it and one weight gradient (its tail).
Before its first input gradient is there it can only run forwards, as many as fit in its memory. And what it holds,
from forward to gradient, summed over time, fits in its memory for the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from autopipe.core.schedule import Shape, StageMemory, StageTimes


class _Way(NamedTuple):
    """When one micro-batch alone reaches each stage's F and I, and from each I's end to the end of everything."""

    heads: list[float]
    backs: list[float]
    tails: list[float]


def makespan_bound_s(shape: Shape, times: Sequence[StageTimes], memory: StageMemory | None = None) -> float:
    """Seconds that no order of these actions can beat, each backward whole or split as it likes."""
    way = _way(shape, times)
    ranks = (_rank_bound_s(shape, times, memory, way, rank) for rank in range(shape.ranks))
    return max(way.backs[0] + _all(times[0]), *ranks)


def _back(t: StageTimes) -> float:
    """The least time from a gradient's arrival to its departure."""
    return min(t.input_grad_s, t.backward_s)


def _all(t: StageTimes) -> float:
    """The least time of a whole backward."""
    return min(t.backward_s, t.input_grad_s + t.weight_grad_s)


def _way(shape: Shape, times: Sequence[StageTimes]) -> _Way:
    hops = [*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0]
    heads = [*accumulate((t.forward_s + hop for t, hop in zip(times, hops, strict=True)), initial=0.0)]
    backs, now = [0.0] * shape.stages, heads[-1]
    for s in reversed(range(shape.stages)):
        backs[s] = now
        now += _back(times[s]) + (hops[s - 1] if s else 0.0)
    tails = [_all(times[0]) - _back(times[0])]
    for s in range(1, shape.stages):
        tails.append(hops[s - 1] + (_all(times[0]) if s == 1 else _back(times[s - 1]) + tails[s - 1]))
    return _Way(heads[:-1], backs, tails)


def _rank_bound_s(shape: Shape, times: Sequence[StageTimes], memory: StageMemory | None, way: _Way, rank: int) -> float:
    own, batches = shape.stages_of(rank), shape.micro_batches
    forward = batches * sum(times[s].forward_s for s in own)
    through = batches * sum(_back(times[s]) for s in own)
    backward = batches * sum(_all(times[s]) for s in own)
    head, first = min(way.heads[s] for s in own), min(way.backs[s] for s in own)
    bounds = [head + forward + backward, head + forward + through + min(way.tails[s] for s in own), first + backward]
    if memory:
        bounds.append(forward + backward + first - _early(times, memory, own, rank, forward))
        bounds.append(batches * _held(times, memory, way, own) / memory.caps[rank])
    return max(bounds)


def _early(times: Sequence[StageTimes], memory: StageMemory, own: Sequence[int], rank: int, forward: float) -> float:
    """The most forward seconds that fit in the rank's memory before any gradient is there."""
    if any(memory.after_forward[s] <= 0 for s in own):
        return forward
    return min(forward, memory.caps[rank] * max(times[s].forward_s / memory.after_forward[s] for s in own))


def _held(times: Sequence[StageTimes], memory: StageMemory, way: _Way, own: Sequence[int]) -> float:
    """What one micro-batch holds in a rank's stages, times the seconds, at the least."""
    total = 0.0
    for s in own:
        t, held = times[s], memory.after_forward[s]
        alive = way.backs[s] - way.heads[s] - t.forward_s
        split = (alive + t.input_grad_s) * held + t.weight_grad_s * memory.after_input_grad[s]
        total += min(split, (alive + t.backward_s) * held)
    return total
