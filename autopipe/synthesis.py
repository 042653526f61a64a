"""A schedule made for the stages at hand: searched among known orders, list schedules, and their neighbours.

In this order, until one is within ``ENOUGH`` of the bound, or the tries are spent:

1. list scheduling with the rules that have proved useful;
2. the known schedules, made for these stages, as far as they fit in memory; all of them, unless the bound is met;
3. the building blocks of those on the V placement, which in little memory reach lower than list scheduling does;
4. where there are many micro-batches, the same for fewer, and its steady state repeats (ordering/stretching.py);
5. evolution of the rules of list scheduling (ordering/evolution.py);
6. annealing of the best orders (ordering/annealing.py).

So it is never slower than the best known schedule that fits. At equal times, in the memory of p micro-batches:

    rank 0   0F0 0F1         0I0 0W0 0F2 0I1 0W1     0I2 0W2
    rank 1       1F0     1I0 1F1     1I1 1W0 1F2     1I2 1W1 1W2
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

import autopipe.schedules  # noqa: F401  (registers the known ones)
from autopipe.core.errors import UsageError
from autopipe.core.schedule import Action, Kind, Op, Order, Shape, StageMemory, StageTimes, kinds, place, schedule
from autopipe.ordering.annealing import annealed, evaluated, merged
from autopipe.ordering.bounds import makespan_bound_s
from autopipe.ordering.compiled import has_numba
from autopipe.ordering.evolution import evolved
from autopipe.ordering.listing import Rules, listed
from autopipe.ordering.passes import block_variants
from autopipe.ordering.presets import MANY, backward_first, in_turn, room
from autopipe.ordering.rows import Listed
from autopipe.ordering.stretching import stretched
from autopipe.schedules import v_half, v_min, zb_v

ENOUGH = 1e-3
"""An order within this part of the bound ends the search."""

_EXACT = 1e-9
"""An order within this part of the bound is the best there is."""

_LISTING = 0.4
"""List scheduling gets this part of the time at most: the known schedules come behind it, however long they take."""

_FEW = 3
"""Where there are twice as many, so many times as many micro-batches as ranks are searched first, and the remainder."""

_STRETCHING = 0.3
"""The part of the tries and of the time that the search for few micro-batches gets."""

_EVOLVING, _MOST = 0.5, 0.95
"""The part of what is left that evolution gets, and at the most where orders are large: annealing, which has the rest,
gains nothing with few moves an action."""

_ISLANDS, _ISLAND = 4, 1000
"""Evolution begins anew so many times, where each gets so many tries: now one, now another gets stuck early."""

_PARTS = 4
"""Annealing begins anew so many times at the least, each from the best so far."""

_LINES = 8
"""Annealing goes on from so many orders, in turn; each time that all had theirs, the worst one has had its last."""

_WARM = (0.0005, 0.002, 0.001)
"""How much longer a step may get at first, as a part: every time that all orders have had their turn the next one."""

_PART = 200_000_000
"""A part of annealing makes so many moves at most, times the actions: about a tenth of a second in machine code."""

_STRETCHED, _ANNEALED = "fewer micro-batches", ", annealed"

TRIES = 300
"""Orders that are looked at where no other number is asked for: a second or two of plain Python for 1,000 actions."""

_MOVES = 100
"""So many moves of annealing count as one order of list scheduling: both take about as long."""

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
    memory: StageMemory,
    *,
    tries: int = TRIES,
    budget_s: float | None = None,
    seed: int = 0,
    fast: bool = False,
) -> Synthesis:
    """The best order that is found for these stages, with hops as in the shape, in this memory.

    ``tries`` is how many orders the search may look at, so that equal arguments give equal orders; ``budget_s`` ends
    it earlier, in seconds of the processor. ``fast`` compiles its loops with numba, which takes seconds once.
    Raises UsageError where not even one micro-batch at a time fits.
    """
    search = _Search(shape, times, memory, tries, budget_s, seed, fast)
    if search.best is None:
        raise UsageError(
            f"{NAME}: one micro-batch does not fit on some rank of {shape.ranks}: allow more memory or fewer stages"
        )
    found = search.best
    return Synthesis(shape, found.order, found.makespan_s, search.bound_s, search.origin)


@schedule(NAME, placement="v", stages_per_rank=(), looks_at_times=True, also=("loop",))
def synthesized(shape: Shape, times: Sequence[StageTimes]) -> Order:
    """The best order in the shape's memory, by default that of p micro-batches."""
    memory = shape.memory or StageMemory.of(shape, shape.ranks)
    many = 3 * shape.stages * shape.micro_batches * TRIES > MANY
    return synthesize(shape, times, memory, tries=TRIES, fast=has_numba(loaded=not many)).order


@dataclass
class _Search:
    """The search's state: the best so far, others, the tries left.

    ``last_s`` is what the end of the search takes, and ``try_s`` an order of list scheduling, about.

    An ``inner`` one is for fewer micro-batches than are asked for. It leaves out the known schedules and splits all
    backwards of a stage or none, so that its orders can be stretched.
    """

    shape: Shape
    times: Sequence[StageTimes]
    memory: StageMemory
    tries: int
    budget_s: float | None
    seed: int
    fast: bool
    inner: bool = False
    best: Listed | None = None
    origin: str = ""
    others: list[tuple[Listed, str]] = field(default_factory=list)
    started: float = field(default_factory=time.process_time)
    bound_s: float = 0.0
    last_s: float = 0.0
    try_s: float = 0.0

    def __post_init__(self) -> None:
        self.bound_s = makespan_bound_s(self.shape, self.times, self.memory)
        self._alone()
        self.last_s = time.process_time() - self.started
        self._list()
        if not self.inner and (self.best is None or self.best.makespan_s > self.bound_s * (1 + _EXACT)):
            self._known()
        for step in (self._blocks, self._stretch, self._evolve, self._anneal):
            if not self._over(self._until(1.0)):
                step()
        if self.best is not None and not self.inner:
            self._offer(merged(self.best, times=self.times, memory=self.memory), self.origin)

    @property
    def actions(self) -> int:
        """How many actions an order has where all backwards are split."""
        return 3 * self.shape.stages * self.shape.micro_batches

    def _until(self, part: float) -> float:
        """When this part of the time that is left will have passed, on the processor's clock."""
        now = time.process_time()
        return inf if self.budget_s is None else now + part * (self.started + self.budget_s - self.last_s - now)

    def _over(self, until: float) -> bool:
        """Whether the bound is met, or the time over."""
        return time.process_time() > until or (self.best is not None and self._enough(self.best.makespan_s))

    def _enough(self, makespan_s: float) -> bool:
        return makespan_s <= self.bound_s * (1 + ENOUGH)

    def _offer(self, found: Listed | None, origin: str) -> None:
        if found and (self.best is None or found.makespan_s < self.best.makespan_s * (1 - 1e-12)):
            self.best, self.origin = found, origin

    def _alone(self) -> None:
        """One micro-batch after the other: what fits if anything does."""
        alone = evaluated(self.shape, one_by_one(self.shape), self.times, self.memory, fast=self.fast)
        self._offer(alone, "one micro-batch at a time")

    def _known(self) -> None:
        """The schedules by name whose placement this is, whatever the tries."""
        for kind in kinds("torch"):
            order = known_order(kind, self.shape, self.times)
            if order is not None:
                self._offer(evaluated(self.shape, order, self.times, self.memory, fast=self.fast), kind.name)

    def _blocks(self) -> None:
        """The blocks of ZB-V, V-Half and V-Min, in this memory."""
        if self.shape.placement != place("v", self.shape.ranks, 2):
            return
        for block in (zb_v, v_half, v_min):
            variants = [rules for rules in block_variants(block.slots(self.shape.ranks)) if not rules.balance]
            self._try(variants, f"block of {block.__name__.rpartition('.')[2]}", self._until(1.0))

    def _list(self) -> None:
        begin, tries = time.process_time(), self.tries
        self._try(_rules(self.shape, self.times), "list scheduling", self._until(_LISTING))
        self.try_s = max(1e-9, (time.process_time() - begin) / max(1, tries - self.tries))

    def _try(self, rules: Sequence[Rules], origin: str, until: float) -> None:
        for rule in rules:
            if self._over(until) or self.tries < 1:
                return
            self.tries -= 1
            self._offer(listed(self.shape, self.times, self.memory, rule, fast=self.fast), origin)

    def _stretch(self) -> None:
        """The best order for fewer micro-batches, with some of them again and again."""
        p, m = self.shape.ranks, self.shape.micro_batches
        few = replace(self.shape, micro_batches=_FEW * p + m % p)
        if 2 * few.micro_batches > m:
            return
        tries, begin = int(_STRETCHING * self.tries), time.process_time()
        self.tries -= tries
        until = self._until(_STRETCHING)
        budget_s = until - begin if until < inf else None
        found = _Search(few, self.times, self.memory, tries // 2, budget_s, self.seed, self.fast, inner=True).best
        if found:
            self._repeat(found, tries // 2)

    def _repeat(self, few: Listed, tries: int) -> None:
        """Ways to repeat the steady state of an order for fewer micro-batches."""
        best, until = None, self._until(_STRETCHING)
        for made in islice(stretched(few, self.shape, self.times, self.memory, fast=self.fast), tries):
            if made and (best is None or made.makespan_s < best.makespan_s):
                best = made
            if time.process_time() > until:
                break
        if best:
            self._offer(best, _STRETCHED)
            self.others = [(best, _STRETCHED)]

    def _evolve(self) -> None:
        """A part of the tries that are left, and of the time, for evolutions that know nothing of each other."""
        now = time.process_time()
        enough = min(self.tries, (self._until(1.0) - now) / self.try_s)
        part = min(_MOST, max(_EVOLVING, 1 - enough / (2 * self.actions)))
        tries, until = int(part * self.tries), self._until(part)
        self.tries -= tries
        islands = max(1, min(_ISLANDS, int(part * enough) // _ISLAND))
        for island in range(islands):
            found = self._evolved(tries // islands, now + (until - now) * (island + 1) / islands, island)
            self.others += [(each, "evolution") for each in found[: _LINES // islands]]
            if self._over(until):
                return

    def _evolved(self, tries: int, until: float, island: int) -> list[Listed]:
        found = evolved(
            self.shape,
            self.times,
            self.memory,
            tries=tries,
            whole=_whole(self.times),
            enough=lambda value: self._enough(value) or time.process_time() > until,
            seed=self.seed + island,
            fast=self.fast,
        )
        for each in found[:1]:
            self._offer(each, "evolution")
        return found

    def _anneal(self) -> None:
        """The rest, a part at a time, in turn from the best and from others, which each go on from their own best."""
        lines = [(self.best, self.origin)] if self.best else []
        lines = [*lines, *(each for each in self.others if each[0] is not self.best)][:_LINES]
        left, until, turn, parts = _MOVES * self.tries, self._until(1.0), 0, 0
        part = max(1, min(left // _PARTS, _PART // self.actions))
        while lines and left >= part:
            for n, (begun, origin) in enumerate(lines):
                if self._over(until - self.last_s) or left < part:  # beginning takes about as long as the end
                    return
                found = self._annealed(begun, part, _WARM[turn % len(_WARM)], parts, until)
                self._offer(found, origin + _ANNEALED)
                lines[n], left, parts = (found, origin), left - part, parts + 1
            turn += 1
            lines = sorted(lines, key=lambda line: line[0].makespan_s)[: max(2, len(lines) - 1)]

    def _annealed(self, begun: Listed, tries: int, warm: float, number: int, until: float) -> Listed:
        return annealed(
            begun,
            self.times,
            self.memory,
            tries=tries,
            warm=warm,
            enough=lambda value: self._enough(value) or time.process_time() > until,
            seed=self.seed + number,
            fast=self.fast,
        )


def one_by_one(shape: Shape) -> Order:
    """Each micro-batch forward and back before the next one."""

    def row(own: Sequence[int]) -> tuple[Action, ...]:
        ways = [*((s, Op.F) for s in own), *((s, Op.B) for s in reversed(own))]
        return tuple(Action(s, op, b) for b in range(shape.micro_batches) for s, op in ways)

    return tuple(row(shape.stages_of(rank)) for rank in range(shape.ranks))


def known_order(kind: Kind, shape: Shape, times: Sequence[StageTimes]) -> Order | None:
    """What a known schedule does with these stages; None where it takes another placement or refuses the shape."""
    number = shape.stages // shape.ranks
    if kind.name == NAME or not kind.takes(number) or kind.place(shape.ranks, number) != shape.placement:
        return None
    return None if kind.refuses(shape) else kind.make(shape, times)


def _whole(times: Sequence[StageTimes]) -> tuple[bool, ...]:
    """Which stages do not split their backward, to begin with; () where splitting costs nothing anywhere."""
    if all(t.backward_s >= t.input_grad_s + t.weight_grad_s for t in times):
        return ()
    return tuple(t.backward_s < t.input_grad_s + t.weight_grad_s * (s == 0) for s, t in enumerate(times))


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
