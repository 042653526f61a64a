"""What no order of the actions can beat, for stages, hops and memory that are given.

A rank starts when the first micro-batch reaches it (its head), and must do all its work. Before its first input
gradient is there it can only run forwards, as many as fit in its memory. Behind its last forward of a stage, and behind
its last input gradient of a stage, that micro-batch has its way to go until all is done, and meanwhile the rank has no
other work than what its memory still holds: what is missing it idles, at its end as at its beginning. And what it
holds, from forward to gradient, summed over time, fits in its memory for the time of a step.

With one stage on a rank, in the memory of p micro-batches, rank 0 idles (p − 1)I before its first gradient and
(p − 1)(F − W) behind its last forward: together the (p − 1)(F + I − W) of ZB-H1, which is therefore the best there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from autopipe.core.schedule import Shape, StageMemory, StageTimes


class _Way(NamedTuple):
    """When one micro-batch alone reaches each stage's F and I, and from the start of each to the end of everything."""

    heads: list[float]
    backs: list[float]
    after_heads: list[float]
    after_backs: list[float]


class _Rank(NamedTuple):
    """One rank's stages, ascending, their times and what they hold, and its cap."""

    stages: tuple[int, ...]
    times: list[StageTimes]
    after_forward: list[float]
    after_back: list[float]
    cap: float

    @property
    def forward(self) -> list[float]:
        """Seconds of each stage's F."""
        return [t.forward_s for t in self.times]

    @property
    def backward(self) -> list[float]:
        """The least seconds of each stage's whole backward."""
        return [_all(t) for t in self.times]

    @property
    def weights(self) -> list[float]:
        """The most that can be left of each stage's backward when its gradient is on its way."""
        return [_all(t) - _back(t) for t in self.times]


def makespan_bound_s(shape: Shape, times: Sequence[StageTimes], memory: StageMemory | None = None) -> float:
    """Seconds that no order of these actions can beat, each backward whole or split as it likes."""
    way = _way(shape, times)
    ranks = (_rank_bound_s(shape.micro_batches, way, _rank(shape, times, memory, rank)) for rank in range(shape.ranks))
    return max(way.after_heads[0], *ranks)


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
    end = backs[0] + _all(times[0])
    return _Way(heads[:-1], backs, [end - at for at in heads[:-1]], [end - at for at in backs])


def _rank(shape: Shape, times: Sequence[StageTimes], memory: StageMemory | None, rank: int) -> _Rank:
    own = shape.stages_of(rank)
    of = [times[s] for s in own]
    if memory is None:
        return _Rank(own, of, [0.0] * len(own), [0.0] * len(own), inf)
    held, left = ([sizes[s] for s in own] for sizes in (memory.after_forward, memory.after_input_grad))
    return _Rank(own, of, held, left, memory.caps[rank])


def _rank_bound_s(batches: int, way: _Way, rank: _Rank) -> float:
    backward = batches * sum(rank.backward)
    work = batches * sum(rank.forward) + backward
    head, first = min(way.heads[s] for s in rank.stages), min(way.backs[s] for s in rank.stages)
    begin = max(head, first - _early(batches, rank))
    behind = max(_idle_behind_forwards(batches, way, rank), _idle_behind_backwards(batches, way, rank), 0.0)
    return max(first + backward, begin + work + behind, head + batches * _held(way, rank) / rank.cap)


def _early(batches: int, rank: _Rank) -> float:
    """The most forward seconds that fit in the rank's memory before any gradient is there."""
    return min(batches * sum(rank.forward), _fitting(rank.cap, _most(rank.forward, rank.after_forward)))


def _idle_behind_forwards(batches: int, way: _Way, rank: _Rank) -> float:
    """From the start of a stage's last F, where memory lets that come only after the rank's first I.

    What is left: that micro-batch, which holds all stages before it, too, and others, each as far as it likes.
    """
    idle, backward, held = -inf, rank.backward, [*accumulate(rank.after_forward)]
    least = max(_most(rank.weights, rank.after_back), _most(backward, rank.after_forward))
    left = [sum(rank.forward[n + 1 :]) + sum(backward) for n in range(len(held))]
    for n, s in enumerate(rank.stages):
        if batches * rank.after_forward[n] > rank.cap * (1 + 1e-9):
            others = _fitting(rank.cap - held[n], max(least, _most(left[n:], held[n:])))
            idle = max(idle, way.after_heads[s] - rank.forward[n] - left[n] - others)
    return idle


def _idle_behind_backwards(batches: int, way: _Way, rank: _Rank) -> float:
    """From the start of a stage's last I: what is left are backwards of the stages before it, and weight gradients."""
    idle, backward, weights = -inf, rank.backward, rank.weights
    least = _most(weights, rank.after_back)
    for n, s in enumerate(rank.stages):
        ratio = max(least, _most(backward[:n], rank.after_forward[:n]))
        others = (batches - 1) * sum(backward[:n]) + batches * sum(weights[n:]) - weights[n]
        others = min(others, _fitting(rank.cap - sum(rank.after_forward[: n + 1]), ratio))
        idle = max(idle, way.after_backs[s] - sum(backward[: n + 1]) - others)
    return idle


def _held(way: _Way, rank: _Rank) -> float:
    """What one micro-batch holds in a rank's stages, times the seconds, at the least."""
    total = 0.0
    for s, t, held, left in zip(rank.stages, rank.times, rank.after_forward, rank.after_back, strict=True):
        alive = way.backs[s] - way.heads[s] - t.forward_s
        split = (alive + t.input_grad_s) * held + t.weight_grad_s * left
        total += min(split, (alive + t.backward_s) * held)
    return total


def _most(seconds: Sequence[float], sizes: Sequence[float]) -> float:
    """The most seconds for a byte; infinity where something takes none."""
    pairs = zip(seconds, sizes, strict=True)
    return max(((s / size if size > 0 else inf) for s, size in pairs if s > 0), default=0.0)


def _fitting(size: float, ratio: float) -> float:
    """The seconds of what fits."""
    return size * ratio if size > 0 and ratio > 0 else 0.0
