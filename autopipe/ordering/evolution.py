"""Evolution of the rules of list scheduling: the best ones are varied at random, and better ones replace them.

What is varied: how the way of a micro-batch is drawn out on each pass over the ranks (which sets how many are in
flight where), the window, the filling of gaps, how many micro-batches may be between F and I, and how many of them are
admitted: p at a time keep step on the way over all ranks, where more would fill the memory of the first ones. The first
and the last micro-batches are another matter than those between: until the first is back ranks only fill up, behind
the last they only run empty, so these may follow each other at another pace, and ranks may wait for them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from autopipe.core.schedule import Shape, StageMemory, StageTimes
from autopipe.ordering.listing import Rules, listed
from autopipe.ordering.presets import FILLS, period_s, way_keys
from autopipe.ordering.rows import Listed

_KEPT = 6
"""So many of the best are varied."""


@dataclass(frozen=True)
class Gene:
    """What makes rules: see presets.way_keys and Rules. ``window`` counts forwards; ``most`` is relative to the way.

    ``admitted`` is how many micro-batches may be between the first stage's F and I. ``paces`` are the periods of the
    first and the last p micro-batches, as parts of the others'. For the first and the last ``keen`` micro-batches a
    rank waits as long as it sees ahead.
    """

    stretches: tuple[float, ...]
    window: float = 0.0
    fill: float = 0.5
    balance: bool = False
    strict: bool = False
    most: float = inf
    whole: tuple[bool, ...] = ()
    admitted: float = inf
    paces: tuple[float, float] = (1.0, 1.0)
    keen: tuple[int, int] = (0, 0)

    def rules(self, shape: Shape, times: Sequence[StageTimes]) -> Rules:
        """The rules for stages."""
        forwards, backs = way_keys(shape, times, self.stretches)
        period = period_s(shape, times)
        spans = [(back - f) / period for f, back in zip(forwards, backs, strict=True)]
        return Rules(
            forwards,
            backs,
            period,
            windows=self._windows(shape, times),
            fill=self.fill,
            balance=self.balance,
            strict=self.strict,
            most=self._most(spans),
            whole=self.whole,
            turns=self._turns(shape),
        )

    def _most(self, spans: Sequence[float]) -> tuple[float, ...]:
        """How many micro-batches may be between each stage's F and I."""
        if self.most == self.admitted == inf:
            return ()
        most = [max(1.0, round(self.most * span + 1) if self.most < inf else inf) for span in spans]
        return (min(most[0], self.admitted), *most[1:])

    def _windows(self, shape: Shape, times: Sequence[StageTimes]) -> tuple[float, ...]:
        """Ranks wait longer for the first and the last micro-batches, of which everything waits."""
        unit = max(t.forward_s for t in times)
        keen = unit + max(shape.hops_s, default=0.0)
        first, last = self.keen
        m = shape.micro_batches
        return tuple(keen if n < first or n >= m - last else self.window * unit for n in range(m))

    def _turns(self, shape: Shape) -> tuple[float, ...]:
        """The first and the last p micro-batches may follow each other faster or more slowly than the others."""
        if self.paces == (1.0, 1.0):
            return ()
        first, last = self.paces
        p, m = shape.ranks, shape.micro_batches
        return tuple(accumulate(first if n < p else last if n >= m - p else 1.0 for n in range(m)))


def first_genes(shape: Shape, whole: tuple[bool, ...] = ()) -> Iterator[Gene]:
    """Ways to begin: even ways and drawn-out ones, with and without waiting, and then p micro-batches at a time."""
    passes = 2 * -(-shape.stages // shape.ranks)
    for stretch in (0.5, 1.0, 2.0, 3.0):
        for window in (0.0, 0.5):
            for fill in FILLS:
                yield Gene((stretch,) * passes, window, fill, whole=whole)
    for admitted in (shape.ranks, shape.ranks + 1):
        for stretch in (1.0, 3.0):
            for keen in ((0, 0), (1, 0)):
                for fill in FILLS:
                    yield Gene((stretch,) * passes, 0.0, fill, whole=whole, admitted=admitted, keen=keen)


def varied(gene: Gene, rng: random.Random) -> Gene:
    """A neighbour of a gene."""
    (change,) = rng.choices((_stretched, _admitting, _paced, _waiting, _filling, _otherwise), (9, 3, 2, 3, 2, 3))
    return change(gene, rng)


def _stretched(gene: Gene, rng: random.Random) -> Gene:
    stretches = list(gene.stretches)
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(stretches))
        stretches[place] = min(12.0, max(0.1, stretches[place] * rng.uniform(0.6, 1.6)))
    return replace(gene, stretches=tuple(stretches))


def _admitting(gene: Gene, rng: random.Random) -> Gene:
    if gene.admitted == inf:
        return replace(gene, admitted=rng.randint(2, 3 * len(gene.stretches) + 12))
    return replace(gene, admitted=rng.choice([inf, *(max(1.0, gene.admitted + d) for d in (-2, -1, 1, 1, 2, 3))]))


def _paced(gene: Gene, rng: random.Random) -> Gene:
    first, last = gene.paces
    if rng.random() < 0.5:
        return replace(gene, paces=(rng.choice([0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0]), last))
    return replace(gene, paces=(first, rng.choice([-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25])))


def _waiting(gene: Gene, rng: random.Random) -> Gene:
    if rng.random() < 0.5:
        return replace(gene, window=rng.choice([0.0, 0.25, 0.5, 1.0, 1.5]))
    return replace(gene, keen=(rng.choice([0, 0, 1, 1, 2, 3]), rng.choice([0, 0, 1, 2, 3])))


def _filling(gene: Gene, rng: random.Random) -> Gene:
    return replace(gene, fill=rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]), balance=rng.random() < 0.3)


def _otherwise(gene: Gene, rng: random.Random) -> Gene:
    turn = rng.random()
    if turn < 0.3:
        return replace(gene, strict=not gene.strict)
    if turn < 0.6 and gene.whole:
        place = rng.randrange(len(gene.whole))
        return replace(gene, whole=tuple(one != (s == place) for s, one in enumerate(gene.whole)))
    return replace(gene, most=rng.choice([inf, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0]))


def evolved(
    shape: Shape,
    times: Sequence[StageTimes],
    memory: StageMemory,
    *,
    tries: int,
    enough: Callable[[float], bool],
    whole: tuple[bool, ...] = (),
    seed: int = 0,
    fast: bool = False,
) -> list[Listed]:
    """The best orders that ``tries`` genes gave, best first; fewer where a makespan is ``enough``.

    ``whole`` says of which stages the backward is not split, at first.
    """
    rng = random.Random(seed)
    kept: list[tuple[float, int, Gene, Listed]] = []
    waiting = [*first_genes(shape, whole)]
    start = waiting[0]
    for number in range(tries):
        gene = waiting.pop(0) if waiting else varied(kept[_pick(rng, len(kept))][2] if kept else start, rng)
        made = listed(shape, times, memory, gene.rules(shape, times), fast=fast)
        known = made and any(abs(made.makespan_s - other[0]) <= 1e-12 * other[0] for other in kept)
        if made and not known:
            kept = sorted([*kept, (made.makespan_s, number, gene, made)], key=lambda item: item[:2])[:_KEPT]
        if enough(kept[0][0] if kept else inf):
            break
    return [made for *_, made in kept]


def _pick(rng: random.Random, count: int) -> int:
    """One of the best, the first ones more often."""
    return min(rng.randrange(count), rng.randrange(count))
