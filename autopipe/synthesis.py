"""A schedule made for the stages at hand: searched among known orders, list schedules, and their neighbours.

In this order, until one is within ``ENOUGH`` of the bound, or the effort is spent:

1. the known schedules, made for these stages, as far as they fit in memory; and the building blocks of those on the
   V placement, which reach lower than list scheduling does;
2. list scheduling with many rules, and evolution of the best of them (ordering/evolution.py);
3. annealing of the best orders (ordering/annealing.py).

So it is never slower than the best known schedule that fits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import autopipe.schedules  # noqa: F401  (registers the known ones)
from autopipe.core.errors import UsageError
from autopipe.core.schedule import Kind, Order, Shape, StageTimes, kinds, place, schedule
from autopipe.ordering.annealing import annealed, evaluated, merged
from autopipe.ordering.bounds import makespan_bound_s
from autopipe.ordering.evolution import evolved
from autopipe.ordering.listing import Listed, Memory, Rules, listed
from autopipe.ordering.passes import block_variants
from autopipe.ordering.presets import backward_first, in_turn, room
from autopipe.schedules import v_half, v_min, zb_v

ENOUGH = 1e-3
"""An order within this part of the bound ends the search."""

_PARTS = 4
"""Annealing begins anew so many times, each from the best so far."""

_ANNEALED = ", annealed"

EFFORT = 2_000_000
"""Actions that list scheduling may place where no other effort is asked for: about a second in plain Python."""

NAME = "Synthesized"


@dataclass(frozen=True)
class Synthesis:
    """The best order found, what it takes, the bound, and which search gave it."""

    shape: Shape
    order: Order
    makespan_s: float
    lower_bound_s: float
    origin: str

    @property
    def gap(self) -> float:
        """makespan / bound − 1."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


def synthesize(
    shape: Shape,
    times: Sequence[StageTimes],
    memory: Memory,
    *,
    effort: int = EFFORT,
    budget_s: float | None = None,
    seed: int = 0,
    fast: bool = False,
) -> Synthesis:
    """The best order that is found for these stages, with hops as in the shape, in this memory.

    ``effort`` is how many actions the search may place or move, so that equal arguments give equal orders;
    ``budget_s`` ends it earlier, by the clock. ``fast`` compiles its loops with numba, which takes seconds once.
    Raises UsageError where not even one micro-batch at a time fits.
    """
    search = _Search(shape, times, memory, effort, budget_s, seed, fast)
    if search.best is None:
        raise UsageError(
            f"{NAME}: one micro-batch does not fit on some rank of {shape.ranks}: allow more memory or fewer stages"
        )
    found = search.best
    return Synthesis(shape, found.order, found.makespan_s, search.bound_s, search.origin)


@schedule(NAME, placement="v", stages_per_rank=())
def synthesized(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The best order in the memory of ``shape.cap`` micro-batches, by default of p."""
    cap = shape.ranks if shape.cap is None else shape.cap
    return synthesize(shape, times, Memory.of(shape, cap)).order


@dataclass
class _Search:
    """The search's state: the best so far and the effort left."""

    shape: Shape
    times: Sequence[StageTimes]
    memory: Memory
    effort: int
    budget_s: float | None
    seed: int
    fast: bool
    best: Listed | None = None
    origin: str = ""
    started: float = field(default_factory=time.monotonic)
    bound_s: float = 0.0
    actions: int = 0

    def __post_init__(self) -> None:
        self.bound_s = makespan_bound_s(self.shape, self.times, self.memory)
        self.actions = 3 * self.shape.stages * self.shape.micro_batches
        self._known()
        for step in (self._blocks, self._list, self._evolve, self._anneal):
            if not self._over():
                step()
        if self.best is not None:
            self._offer(merged(self.best, times=self.times, memory=self.memory), self.origin)

    def _over(self) -> bool:
        late = self.budget_s is not None and time.monotonic() - self.started > self.budget_s
        return late or (self.best is not None and self._enough(self.best.makespan_s))

    def _enough(self, makespan_s: float) -> bool:
        return makespan_s <= self.bound_s * (1 + ENOUGH)

    def _offer(self, found: Listed | None, origin: str) -> None:
        if found and (self.best is None or found.makespan_s < self.best.makespan_s * (1 - 1e-12)):
            self.best, self.origin = found, origin

    def _known(self) -> None:
        """The schedules by name whose placement this is; none is cut short by effort."""
        for kind in kinds():
            order = known_order(kind, self.shape, self.times)
            if order is not None:
                self._offer(evaluated(self.shape, order, self.times, self.memory, fast=self.fast), kind.name)

    def _blocks(self) -> None:
        """The blocks of ZB-V, V-Half and V-Min, in this memory."""
        if self.shape.placement != place("v", self.shape.ranks, 2):
            return
        for block in (zb_v, v_half, v_min):
            self._try(block_variants(block.slots(self.shape.ranks)), f"block of {block.__name__.rpartition('.')[2]}")

    def _list(self) -> None:
        self._try(_rules(self.shape, self.times), "list scheduling")

    def _try(self, rules: Sequence[Rules], origin: str) -> None:
        for rule in rules:
            if self._over() or self.effort < 0:
                return
            self.effort -= self.actions
            self._offer(listed(self.shape, self.times, self.memory, rule, fast=self.fast), origin)

    def _evolve(self) -> None:
        """Half of what effort is left."""
        tries = self.effort // 2 // self.actions
        self.effort -= tries * self.actions
        late = self.budget_s and self.started + self.budget_s / 2
        found = evolved(
            self.shape,
            self.times,
            self.memory,
            tries=tries,
            whole=tuple(t.backward_s < t.input_grad_s for t in self.times),
            enough=lambda value: self._enough(value) or bool(late and time.monotonic() > late),
            seed=self.seed,
            fast=self.fast,
        )
        for each in found[:1]:
            self._offer(each, "evolution")

    def _anneal(self) -> None:
        """The rest of the effort, a part at a time, each from the best so far."""
        for turn in range(_PARTS):
            tries = self.effort // self.actions // (_PARTS - turn)
            if self._over() or self.best is None or tries < 1:
                return
            self.effort -= tries * self.actions
            origin = self.origin.removesuffix(_ANNEALED) + _ANNEALED
            found = annealed(self.best, self.times, self.memory, tries=tries, seed=self.seed + turn, fast=self.fast)
            self._offer(found, origin)


def known_order(kind: Kind, shape: Shape, times: Sequence[StageTimes]) -> Order | None:
    """What a known schedule does with these stages; None where it takes another placement or refuses the shape."""
    number = shape.stages // shape.ranks
    if kind.name == NAME or not kind.takes(number) or kind.place(shape.ranks, number) != shape.placement:
        return None
    return None if kind.refuses(shape) else kind.make(shape, times)


def _rules(shape: Shape, times: Sequence[StageTimes]) -> list[Rules]:
    """I first, with as many forwards before it as there is time for; with one stage on a rank also in turn."""
    rules = [*backward_first(shape)]
    for share in (0.0, 0.125, 0.75, 1.0):
        rules += backward_first(shape, room(shape, times, share))
    if shape.placement == place("loop", shape.ranks, 1):
        ahead = range(shape.ranks, 0, -1)
        for factor in (1.0, 1.5, 2.0):
            rules += in_turn(shape, [factor * rank for rank in ahead])
    return rules
