"""The space that a search covers: depths × micro-batch sizes × schedules, and the best of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopipe.core.schedule import Kind, Shape
from autopipe.planning.bounds import quick_bound_s
from autopipe.planning.cases import Case, Found
from autopipe.planning.ranges import Ranges
from autopipe.planning.tables import Setting

SAME = 1e-9
"""Steps that differ by less are equal: well above rounding, far below any measurement."""


class Key(NamedTuple):
    """What tells one case of a space from another."""

    depth: int
    micro_batch: int
    kind: Kind


class Choice(NamedTuple):
    """A case and its best split."""

    case: Case
    found: Found


class Answer(NamedTuple):
    """The best choice of a space (None where nothing fits), and the seconds that no plan in it can beat."""

    best: Choice | None
    lower_bound_s: float


@dataclass(frozen=True, eq=False)
class Space:
    """What was asked for. Cases are made when they are first needed, and kept; narrower spaces share them."""

    setting: Setting
    global_batch: int
    depths: tuple[int, ...]
    micro_batches: tuple[int, ...]
    kinds: tuple[Kind, ...]
    recompute: str
    _ranges: dict[int, Ranges] = field(default_factory=dict)
    _cases: dict[tuple[int, int, str], Case] = field(default_factory=dict)
    _bounds: dict[tuple[int, int, str], float] = field(default_factory=dict)

    def all(self) -> Iterator[Key]:
        """All cases whose shape the schedule takes."""
        for depth in self.depths:
            for micro_batch in self.micro_batches:
                for kind in self.kinds:
                    shape = Shape(depth, self.global_batch // micro_batch, kind.place(depth))
                    if not kind.refuses(shape):
                        yield Key(depth, micro_batch, kind)

    def ranges(self, micro_batch: int) -> Ranges:
        """The profile's ranges at a micro-batch size."""
        if micro_batch not in self._ranges:
            setting, everything = self.setting, self.recompute == "all"
            self._ranges[micro_batch] = Ranges.of(
                setting.profile, micro_batch, optimizer=setting.optimizer, recompute_all=everything
            )
        return self._ranges[micro_batch]

    def case(self, key: Key) -> Case:
        """The case of a key."""
        name = (key.depth, key.micro_batch, key.kind.name)
        if name not in self._cases:
            table = key.kind.schedule(key.depth, self.global_batch // key.micro_batch)
            ranges = self.ranges(key.micro_batch)
            self._cases[name] = Case(self.setting, ranges, table, key.micro_batch, self.recompute)
        return self._cases[name]

    def quick_bound_s(self, key: Key) -> float:
        """A bound for a case that needs neither its schedule nor its tables."""
        batches = self.global_batch // key.micro_batch
        return quick_bound_s(self.setting, self.ranges(key.micro_batch), key.depth, batches)

    def bound_s(self, key: Key) -> float:
        """The bound of a case."""
        name = (key.depth, key.micro_batch, key.kind.name)
        if name not in self._bounds:
            self._bounds[name] = self.case(key).lower_bound_s
        return self._bounds[name]

    def tight(self) -> bool:
        """Whether memory kept any of the cases that were looked at from a split."""
        return any(
            (case.tables.open & ~case.tables.allowed).any() or case.tables.taken.any() for case in self._cases.values()
        )

    def only(self, *, depth: int | None = None, micro_batch: int | None = None, kind: Kind | None = None) -> Space:
        """The part of the space with that depth, micro-batch size or schedule."""
        return replace(
            self,
            depths=self.depths if depth is None else (depth,),
            micro_batches=self.micro_batches if micro_batch is None else (micro_batch,),
            kinds=self.kinds if kind is None else (kind,),
        )

    def under(self, setting: Setting, *, recompute: str | None = None) -> Space:
        """The same space in another setting, or with another rule for recomputation."""
        rule = self.recompute if recompute is None else recompute
        return replace(self, setting=setting, recompute=rule, _ranges={}, _cases={}, _bounds={})

    def fits(self) -> bool:
        """Whether any plan in it fits."""
        return any(self.case(key).fits() for key in self.all())


def search(space: Space, *, below_s: float = float("inf")) -> Answer:
    """The best case and split, cases in the order of their bounds: quick ones first, sharper ones where needed.

    A case whose bound is above the best step is not simulated, so the answer is the same as if all were. Cases whose
    bound is not below ``below_s`` are of no interest.
    """
    queue = [(space.quick_bound_s(key), False, number, key) for number, key in enumerate(space.all())]
    heapq.heapify(queue)
    best, least = None, float("inf")
    while queue:
        bound, sharp, number, key = heapq.heappop(queue)
        if bound >= below_s or (best is not None and bound > best.found.step_s * (1 + SAME)):
            break
        if not sharp:
            heapq.heappush(queue, (max(bound, space.bound_s(key)), True, number, key))
            continue
        least = min(least, bound)
        if bound < float("inf") and (found := space.case(key).best) is not None:
            best = _better(best, Choice(space.case(key), found))
    return Answer(best, least)


def _better(best: Choice | None, other: Choice) -> Choice:
    """The faster one; among equals fewer ranks, less memory, larger micro-batches, then the schedule's name."""
    if best is None or other.found.step_s < best.found.step_s * (1 - SAME):
        return other
    if other.found.step_s > best.found.step_s * (1 + SAME):
        return best
    return min(best, other, key=_preference)


def _preference(choice: Choice) -> tuple[int, float, int, str]:
    case, found = choice
    return case.depth, found.bytes, -case.micro_batch, case.schedule.name
