"""Evolution of the rules of list scheduling: the best ones are varied at random, and better ones replace them.

What is varied: how the way of a micro-batch is drawn out on each pass over the ranks (which sets how many are in
flight where), the window, the filling of gaps, and how many micro-batches may be between F and I.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopipe.core.schedule import Shape, StageMemory, StageTimes
from autopipe.ordering.listing import Rules, listed
from autopipe.ordering.presets import FILLS, period_s, way_keys
from autopipe.ordering.rows import Listed

_KEPT = 6
"""So many of the best are varied."""


@dataclass(frozen=True)
class Gene:
    """What makes rules: see presets.way_keys and Rules. ``window`` counts forwards; ``most`` is relative to the way."""

    stretches: tuple[float, ...]
    window: float = 0.0
    fill: float = 0.5
    balance: bool = False
    strict: bool = False
    most: float = inf
    whole: tuple[bool, ...] = ()

    def rules(self, shape: Shape, times: Sequence[StageTimes]) -> Rules:
        """The rules for stages."""
        forwards, backs = way_keys(shape, times, self.stretches)
        period = period_s(shape, times)
        spans = [(back - f) / period for f, back in zip(forwards, backs, strict=True)]
        return Rules(
            forwards,
            backs,
            period,
            window=self.window * max(t.forward_s for t in times),
            fill=self.fill,
            balance=self.balance,
            strict=self.strict,
            most=() if self.most == inf else tuple(max(1.0, round(self.most * span + 1)) for span in spans),
            whole=self.whole,
        )


def first_genes(shape: Shape, whole: tuple[bool, ...] = ()) -> Iterator[Gene]:
    """Ways to begin: even ways and drawn-out ones, with and without waiting."""
    passes = 2 * -(-shape.stages // shape.ranks)
    for stretch in (0.5, 1.0, 2.0, 3.0):
        for window in (0.0, 0.5):
            for fill in FILLS:
                yield Gene((stretch,) * passes, window, fill, whole=whole)


def varied(gene: Gene, rng: random.Random) -> Gene:
    """A neighbour of a gene."""
    turn = rng.random()
    if turn < 0.6:
        stretches = list(gene.stretches)
        for _ in range(rng.randint(1, 2)):
            place = rng.randrange(len(stretches))
            stretches[place] = min(12.0, max(0.1, stretches[place] * rng.uniform(0.6, 1.6)))
        return replace(gene, stretches=tuple(stretches))
    if turn < 0.75:
        return replace(gene, window=rng.choice([0.0, 0.25, 0.5, 1.0, 1.5]))
    if turn < 0.85:
        return replace(gene, fill=rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]), balance=rng.random() < 0.3)
    if turn < 0.9:
        return replace(gene, strict=not gene.strict)
    if turn < 0.95 and gene.whole:
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
