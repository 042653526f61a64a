"""The space that a search covers: depths × replicas × micro-batch sizes × schedules, a case each, and their bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autopipe.core.schedule import TWO_WAY, Kind, Schedule, Shape
from autopipe.core.schedule import kind as named
from autopipe.planning.any_order import any_order_bound_s
from autopipe.planning.bounds import has_lasting_room, quick_period_s, rooms, unlimited_bound_s
from autopipe.planning.cases import Case, horizon_s, reach_of, shared_reach
from autopipe.planning.family import Family, family, sharp_family
from autopipe.planning.keys import Extent, Key, Name
from autopipe.planning.outline import Outline
from autopipe.planning.ranges import Ranges
from autopipe.planning.remaking import Choice, looked_at, placed_as, settled
from autopipe.planning.setting import Setting
from autopipe.planning.tables import places

SEVERAL = (2, 4)
"""Stages on a rank that are tried with the schedules that take any number."""

_REMADE = 0.1
"""Orders are not made for a case's stages where it is slower with those for equal stages by more than this."""

_DEEPER = 8
"""So many stages more than needed a family has that can go on."""


@dataclass(frozen=True, eq=False)
class Space:
    """What was asked for. Cases are made when they are first needed, and kept; narrower spaces share them."""

    setting: Setting
    global_batch: int
    depths: tuple[int, ...]
    replicas: tuple[int, ...]
    micro_batches: tuple[int, ...]
    kinds: tuple[Kind, ...]
    recompute: str
    stages_per_rank: int | None = None
    _ranges: dict[tuple[int, int], Ranges] = field(default_factory=dict)
    _cases: dict[Name, Case] = field(default_factory=dict)
    _keys: dict[tuple[Extent, str, int], tuple[Key, ...]] = field(default_factory=dict)
    _quick: dict[Name, float] = field(default_factory=dict)
    _unlimited: dict[tuple[int, int, int, int, bool, int], float] = field(default_factory=dict)
    _families: dict[tuple[int, int, str, str, int, bool], Family] = field(default_factory=dict)
    _rooms: dict[tuple[int, int, str, str], tuple[tuple[int, ...], list[bool]]] = field(default_factory=dict)
    _bounds: dict[Name, float] = field(default_factory=dict)
    _choices: dict[Name, Choice | None] = field(default_factory=dict)
    _free: dict[tuple[int, int, tuple[int, ...]], float] = field(default_factory=dict)
    _placed: dict[Name, tuple[Case, ...]] = field(default_factory=dict)

    def all(self) -> Sequence[Key]:
        """All cases whose shape the schedule takes."""
        return self._all

    @cached_property
    def _all(self) -> tuple[Key, ...]:
        return tuple(self._made())

    def _made(self) -> Iterator[Key]:
        rows = {depth: self._rows(depth) for depth in self.depths}
        for shape in self.shapes():
            for kind, number in rows[shape.depth]:
                name = shape, kind.name, number
                if name not in self._keys:
                    rules = () if self._refusal(shape, kind, number) else self._rules(kind, number)
                    self._keys[name] = tuple(Key(*shape, kind, number, rule) for rule in rules)
                yield from self._keys[name]

    def shapes(self) -> Iterator[Extent]:
        """All depths, replicas and micro-batch sizes that the devices and the global batch have room for."""
        for depth in self.depths:
            for replicas in self.replicas:
                if depth * replicas <= len(self.setting.limits):
                    for micro_batch in self.micro_batches:
                        if self.global_batch % (micro_batch * replicas) == 0:
                            yield Extent(depth, replicas, micro_batch)

    @property
    def most_devices(self) -> int:
        """The most devices that any case uses."""
        return max((shape.depth * shape.replicas for shape in self.shapes()), default=0)

    def _rows(self, depth: int) -> list[tuple[Kind, int]]:
        """The schedules with their numbers of stages on a rank; several on a single rank make no sense."""
        rows = [(kind, number) for kind in self.kinds for number in numbers(kind, self.stages_per_rank)]
        single = [(kind, number) for kind, number in rows if number == 1 and kind.executor == "torch"]
        return rows if depth > 1 else single or [(named("1F1B"), 1)]

    def _rules(self, kind: Kind, stages_per_rank: int) -> tuple[str, ...]:
        """Whether layers recompute. What recomputes is chosen stage by stage: several on a rank may fit without it.

        It is not chosen where two stages are one part of the model, nor where a forward that runs again would meet
        other weights.
        """
        if self.recompute == "auto" and (kind.placement == TWO_WAY or kind.weights == "latest"):
            return ("none",)
        return ("none", "auto") if self.recompute == "auto" and stages_per_rank > 1 else (self.recompute,)

    def _refusal(self, shape: Extent, kind: Kind, number: int) -> str | None:
        pieces = self._pieces
        if shape.depth * number > pieces:
            return f"it needs {shape.depth * number} stages, the model can be cut into {pieces}"
        if kind.asynchronous and (reason := self._must_flush(shape, kind)):
            return reason
        return kind.refuses(Shape(shape.depth, self.batches(shape), kind.place(shape.depth, number)))

    @cached_property
    def _pieces(self) -> int:
        """Into how many pieces the model can be cut."""
        return len(self.setting.profile.legal_cuts()) + 1

    def _must_flush(self, shape: Extent, kind: Kind) -> str | None:
        """Why an asynchronous schedule cannot run, if so; its ranks never wait for each other."""
        ties = self.setting.profile.trained_ties
        if shape.replicas > 1:
            return "its replicas would have to step together: it runs on 1 replica"
        if ties and shape.depth > 1:
            return f"{ties[0].name} is tied: its stages would have to step together"
        if kind.weights == "latest" and self.recompute == "all":
            return "a forward that runs again would meet other weights: use --recompute none"
        return None

    def batches(self, shape: Extent | Key) -> int:
        """The micro-batches that each pipeline runs."""
        return self.global_batch // (shape.micro_batch * shape.replicas)

    def refusal(self) -> str | None:
        """Why none of it can run, of the last shape that was tried; None where one can."""
        reason = "no number of replicas and micro-batch size divide the global batch on these devices"
        for shape in self.shapes():
            for kind, number in self._rows(shape.depth):
                refused = self._refusal(shape, kind, number)
                if refused is None:
                    return None
                reason = refused
        return reason

    def ranges(self, micro_batch: int, replicas: int = 1) -> Ranges:
        """The profile's ranges at a micro-batch size; replicas may share out the optimizer's state."""
        key = micro_batch, replicas if self.setting.sharded else 1
        if key not in self._ranges:
            update = self.setting.update(replicas)
            self._ranges[key] = Ranges.of(
                self.setting.profile, micro_batch, optimizer=update, recompute_all=self.recompute == "all"
            )
        return self._ranges[key]

    def case(self, key: Key) -> Case:
        """The case of a key."""
        if key.name not in self._cases:
            ranges = self.ranges(key.micro_batch, key.replicas)
            outline, make = self._outline(key), partial(self._table, key, ranges)
            if outline is None:
                schedule = make()
                outline, make = Outline.of(schedule), partial(_same, schedule)
            case = Case(self.setting, ranges, outline, make, key.micro_batch, key.recompute, key.replicas)
            self._cases[key.name] = case.narrowed()
        return self._cases[key.name]

    def _outline(self, key: Key) -> Outline | None:
        """The outline of a schedule that runs F and B in turn; None for others, which takes their order."""
        if key.kind.ahead is None or key.stages_per_rank > 1:
            return None
        return Outline.in_turn(key.kind.name, self.batches(key), self._ahead(key))

    def _ahead(self, key: Key) -> tuple[int, ...]:
        """How many F of each stage come before its first B; see core.schedule.Kind."""
        assert key.kind.ahead is not None
        return tuple(key.kind.ahead(Shape(key.depth, self.batches(key), key.kind.place(key.depth))))

    def _table(self, key: Key, ranges: Ranges) -> Schedule:
        """The schedule for stages that cost the same: the whole model's ticks shared out."""
        placement = key.kind.place(key.depth, key.stages_per_rank)
        hops = self.setting.seats(key.depth, key.replicas).hops(placement)
        middle = np.median(ranges.activations[1:-1]) if ranges.pieces > 1 else 0
        held = max(ranges.held[0, -1], 1)
        return key.kind.schedule(
            key.depth,
            self.batches(key),
            stages_per_rank=key.stages_per_rank,
            times=[ranges.times(len(placement))] * len(placement),
            hops_s=[hop.transfer_s(int(middle)) / ranges.tick_s if hop else 0.0 for hop in hops],
            weight_part=float(ranges.held_after_input_grad[0, -1] / held),
        )

    def choice(self, key: Key) -> Choice | None:
        """The best split of a key's case, with the order that is made for it."""
        if key.name not in self._choices:
            plain = self._without_recomputation(key)
            self._choices[key.name] = self.choice(plain) if plain else settled(self.placed(key), key.kind)
        return self._choices[key.name]

    def _without_recomputation(self, key: Key) -> Key | None:
        """The key of the same plans, where the space has it too: of this one no layer recomputes, and all fits."""
        plain = key._replace(recompute="none")
        also = plain != key and "none" in self._rules(key.kind, key.stages_per_rank)
        return plain if also and not self.case(key).tight else None

    def placed(self, key: Key) -> tuple[Case, ...]:
        """The case of a key, in all placements that its schedule takes; made for equal stages."""
        if key.name not in self._placed:
            self._placed[key.name] = tuple(placed_as(self.case(key), key.kind))
        return self._placed[key.name]

    def let_go(self, key: Key) -> None:
        """Drop the tables of a case that was looked at: those of hundreds would fill the memory."""
        cases = [*self._placed.get(key.name, ()), *([self._cases[key.name]] if key.name in self._cases else [])]
        if (choice := self._choices.get(key.name)) is not None:
            cases.append(choice.case)
        for case in cases:
            case.let_go()

    def behind(self, key: Key, best: Choice) -> bool:
        """Whether a case is so far behind that orders made for its stages will not make it the best.

        Never one that takes any order in little memory: there that for equal stages says nothing of the others.
        """
        if not key.kind.looks_at_times or key.name in self._choices or (key.kind.also and self.case(key).tight):
            return False
        look = looked_at(self.placed(key))
        return look is not None and look.found.step_s > best.found.step_s * (1 + _REMADE)

    def near(self, key: Key) -> Choice | None:
        """A good split of a key's case, without moving cuts and for the order at hand; the best where that is known."""
        case = self.case(key)
        if key.name in self._choices or (key.kind.looks_at_times and not case.large):
            return self.choice(key)
        return Choice(case, case.near) if case.near else None

    def glanced(self, key: Key) -> bool:
        """Whether a case is so large that a good split of it is enough to know."""
        return self.case(key).large

    def quick_bound_s(self, key: Key) -> float:
        """A bound for a case that needs neither its schedule nor its tables; infinite where it cannot fit."""
        if key.name not in self._quick:
            self._quick[key.name] = self._quickly(key)
        return self._quick[key.name]

    def _quickly(self, key: Key) -> float:
        seats, ranges = self.setting.seats(key.depth, key.replicas), self.ranges(key.micro_batch, key.replicas)
        if key.kind.asynchronous:
            return quick_period_s(ranges, seats, self.batches(key))
        number, splits = key.stages_per_rank, key.kind.ahead is None
        ways = 2 if key.kind.placement == TWO_WAY else 1
        if not has_lasting_room(ranges, seats, ways):
            return float("inf")
        name = key.depth, key.replicas, key.micro_batch, number, splits, ways
        if name not in self._unlimited:
            self._unlimited[name] = unlimited_bound_s(
                ranges, seats, self.batches(key), stages_per_rank=ways * number, splits=splits, ways=ways
            )
        return self._unlimited[name]

    def family_bound_s(self, key: Key, *, sharp: bool = False) -> float:
        """A bound that knows the memory and needs one table for many cases; the quick one where there is no such."""
        if key.kind.ahead is None or key.stages_per_rank > 1 or not self.setting.equal:
            return self.quick_bound_s(key)
        quick_s, ranges = self.quick_bound_s(key), self.ranges(key.micro_batch, key.replicas)
        batches, seats = self.batches(key), self.setting.seats(key.depth, key.replicas)
        reach = reach_of(ranges, seats, key.depth, batches, quick_s)
        known = self._family(key, shared_reach(ranges, reach), sharp).bound_s(self._ahead(key))
        if known == float("inf") and not self._might_fit(key):
            return known
        return max(quick_s, min(known, horizon_s(ranges, key.depth, reach, quick_s)))

    def _family(self, key: Key, reach: int, sharp: bool) -> Family:
        """The family of a key's case, with deeper ones, which will be asked for next."""
        name = (key.replicas, key.micro_batch, key.kind.name, key.recompute, reach, sharp)
        known = self._families.get(name)
        if known is None or known.deepest < key.depth:
            ranges = self.ranges(key.micro_batch, key.replicas)
            most = 2 * key.depth if sharp else key.depth + _DEEPER
            most = min(most, ranges.pieces, len(self.setting.limits) // key.replicas)
            outline, seats = self._outline(key._replace(depth=most)), self.setting.seats(most, key.replicas)
            assert outline is not None
            given, again = (self.setting, ranges, outline, seats), key.recompute == "auto"
            self._families[name] = (
                sharp_family(*given, reach=reach, may_recompute=again)
                if sharp
                else family(*given, reach=reach, may_recompute=again, shallower=known)
            )
        return self._families[name]

    def _might_fit(self, key: Key) -> bool:
        """Whether stages of any length might fit; looked at for all depths at once."""
        name = (key.replicas, key.micro_batch, key.kind.name, key.recompute)
        if name not in self._rooms:
            ranges, again = self.ranges(key.micro_batch, key.replicas), key.recompute == "auto"
            most = min(ranges.pieces, len(self.setting.limits) // key.replicas)
            outline, seats = self._outline(key._replace(depth=most)), self.setting.seats(most, key.replicas)
            assert outline is not None
            where = places(outline, seats, shared=again)
            self._rooms[name] = outline.ahead, [*rooms(ranges, where, may_recompute=again)]
        deepest, fits = self._rooms[name]
        return fits[key.depth - 1] or deepest[-key.depth :] != self._ahead(key)

    def bound_s(self, key: Key) -> float:
        """The bound of a case; of a schedule that looks at times the bound of all orders, since its own changes."""
        if key.name not in self._bounds:
            free = key.kind.looks_at_times
            self._bounds[key.name] = self._any_order_bound_s(key) if free else self.case(key).lower_bound_s
        return self._bounds[key.name]

    def _any_order_bound_s(self, key: Key) -> float:
        quick_s = self.quick_bound_s(key)
        if key.kind.placement == TWO_WAY or quick_s == float("inf"):
            return quick_s
        ways = key.kind.placements(key.depth, key.stages_per_rank)
        return max(quick_s, min(self._free_bound_s(key, way) for way in ways))

    def _free_bound_s(self, key: Key, placement: tuple[int, ...]) -> float:
        """The bound of all orders with a placement, for all schedules that have it."""
        name = key.replicas, key.micro_batch, placement
        if name not in self._free:
            ranges, again = self.ranges(key.micro_batch, key.replicas), self.recompute == "auto"
            given = self.setting, ranges, placement, self.batches(key), key.replicas
            self._free[name] = any_order_bound_s(*given, may_recompute=again)
        return self._free[name]

    def tight(self) -> bool:
        """Whether memory kept any of the cases that were looked at from a split, or all of many cases from any."""
        cases = (self._cases[name] for name in (*self._choices, *self._bounds) if name in self._cases)
        return any(case.tight for case in cases) or any(not all(fits) for _, fits in self._rooms.values())

    def only(
        self,
        *,
        depth: int | None = None,
        replicas: int | None = None,
        micro_batch: int | None = None,
        kind: Kind | None = None,
    ) -> Space:
        """The part of the space with that depth, number of replicas, micro-batch size or schedule."""
        return replace(
            self,
            depths=self.depths if depth is None else (depth,),
            replicas=self.replicas if replicas is None else (replicas,),
            micro_batches=self.micro_batches if micro_batch is None else (micro_batch,),
            kinds=self.kinds if kind is None else (kind,),
        )

    def under(self, setting: Setting, *, recompute: str | None = None) -> Space:
        """The same space in another setting, or with another rule for recomputation."""
        rule = self.recompute if recompute is None else recompute
        same = rule == self.recompute and setting.profile is self.setting.profile
        alike = same and setting.keeps_state_as(self.setting)
        return replace(
            self,
            setting=setting,
            recompute=rule,
            _ranges=self._ranges if alike else {},
            _cases={},
            _keys=self._keys if same else {},
            _quick={},
            _unlimited=self._unlimited if alike and setting.on_the_same_devices(self.setting) else {},
            _families={},
            _rooms={},
            _bounds={},
            _choices={},
            _free={},
            _placed={},
        )

    def fits(self) -> bool:
        """Whether any plan in it fits."""
        return any(map(self._fits, self.all()))

    def _fits(self, key: Key) -> bool:
        if key.kind.looks_at_times:
            return self.choice(key) is not None
        found = self.case(key).fits()
        self.let_go(key)
        return found


def numbers(kind: Kind, asked: int | None = None) -> tuple[int, ...]:
    """The numbers of stages on a rank that a schedule is tried with; where one is asked for, that one or none.

    Those that take any number and do not look at times are with one what another schedule is.
    """
    if asked is not None:
        return (asked,) if kind.takes(asked) else ()
    return kind.stages_per_rank or ((1, *SEVERAL) if kind.looks_at_times else SEVERAL)


def _same(schedule: Schedule) -> Schedule:
    return schedule
