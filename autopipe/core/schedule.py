"""A Schedule is a table: for each rank, the compute actions it runs, in order.

1F1B on two ranks with three micro-batches (F forward, B backward):

    rank 0   0F0 0F1 0B0 0F2 0B1 0B2
    rank 1   1F0 1B0 1F1 1B1 1F2 1B2

Communication is not in the table: the runtime adds it. ``validate`` is in core/validation.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, cached_property
from typing import NamedTuple

from autopipe.core.errors import ScheduleError, UsageError
from autopipe.core.units import many

_ACTION = re.compile(r"(\d+)(F|B|I|W|O)(\d+)\Z")


class Op(str, Enum):
    """What an action does. B is I (input gradient) and W (weight gradient) in one."""

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    O = "O"

    __hash__ = str.__hash__  # Enum's own is a slow Python function, and actions are looked up by the million


class Action(NamedTuple):
    """One stage, one operation, one micro-batch. Its text is torch's: ``2F0``."""

    stage: int
    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return str(self.stage) + self.op + str(self.micro_batch)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``2F0`` names. Raises ScheduleError for anything else."""
        match = _ACTION.match(text.strip())
        if match is None:
            raise ScheduleError(f"{text!r} is not an action: write stage, one of F B I W O, micro-batch, as in 2F0")
        return cls(int(match.group(1)), Op(match.group(2)), int(match.group(3)))


Order = tuple[tuple[Action, ...], ...]
"""For each rank, its actions in order."""


def stages_on(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages that a placement puts on a rank, ascending."""
    return tuple(stage for stage, where in enumerate(placement) if where == rank)


@dataclass(frozen=True)
class Shape:
    """What a schedule is asked for: ranks, micro-batches, and which rank holds each stage.

    ``hops_s[s]`` are the seconds that a value takes from stage s to s + 1, or back; () where it takes none.
    ``weight_part`` is the part of a micro-batch's activations that is held on between I and W. ``memory`` is for
    schedules that look at it.
    """

    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    hops_s: tuple[float, ...] = ()
    weight_part: float = 1.0
    memory: StageMemory | None = None

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return stages_on(self.placement, rank)


WEIGHTS = ("flush", "stashed", "synced", "double", "latest")
"""Which weights a micro-batch meets; see core/versions.py."""

TWO_WAY = "two-way"
"""The placement of two replicas of the model that run over the same ranks in opposite directions."""


@dataclass(frozen=True)
class StageMemory:
    """What each stage holds of a micro-batch after F and after I (until W), and what each rank may hold of them.

    The unit is free: bytes, or one micro-batch's activations of a rank.
    """

    after_forward: tuple[float, ...]
    after_input_grad: tuple[float, ...]
    caps: tuple[float, ...]

    @classmethod
    def of(cls, shape: Shape, cap: float) -> StageMemory:
        """One micro-batch's activations of a rank are 1, equal in all its stages."""
        parts = tuple(1 / len(shape.stages_of(rank)) for rank in shape.placement)
        return cls(parts, tuple(part * shape.weight_part for part in parts), (cap,) * shape.ranks)


@dataclass(frozen=True)
class Schedule:
    """An action table and where its stages live. ``executor`` is ``torch`` (flushes every step) or ``own``.

    ``parts`` says which part of the model each stage holds, () that each holds its own. In a two-way pipeline two
    replicas of the model run over the same ranks, and parts are 0 … p−1, 0 … p−1: stage k·p + s is part s of replica k,
    and every micro-batch goes through one of the two.

    ``weights`` is ``flush`` where every micro-batch of the table meets the same weights, and the optimizer runs after
    it. Else the table holds the optimizer steps, ``0O2`` the third one of stage 0, each after an equal number of
    micro-batches, and goes on without a flush (core/periodic.py); ``weights`` then says which weights a micro-batch
    meets (core/versions.py).
    """

    name: str
    placement: tuple[int, ...]
    order: Order
    executor: str = "torch"
    parts: tuple[int, ...] = ()
    weights: str = "flush"

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.order)

    @property
    def stages(self) -> int:
        """How many stages there are, those of both replicas counted."""
        return len(self.placement)

    @cached_property
    def micro_batches(self) -> int:
        """How many micro-batches the table runs."""
        return 1 + max((action.micro_batch for row in self.order for action in row), default=-1)

    @property
    def asynchronous(self) -> bool:
        """Whether updates come without a flush, so that micro-batches meet weights of different age."""
        return self.weights != "flush"

    @cached_property
    def updates(self) -> int:
        """How many optimizer steps belong to the table."""
        if not self.asynchronous:
            return 1
        return 1 + max((a.micro_batch for row in self.order for a in row if a.op is Op.O), default=0)

    @property
    def per_update(self) -> int:
        """How many micro-batches' gradients an optimizer step takes."""
        return self.micro_batches // self.updates

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """The part of the model that each stage holds."""
        return self.parts or tuple(range(self.stages))

    @property
    def ways(self) -> int:
        """How many replicas of the model run over the same ranks: two in a two-way pipeline."""
        return self.part_of.count(0)

    def is_first(self, stage: int) -> bool:
        """Whether a stage receives nothing: it is the first of its replica."""
        return self.part_of[stage] == 0

    def is_last(self, stage: int) -> bool:
        """Whether a stage makes the loss: it is the last of its replica."""
        return stage == self.stages - 1 or self.part_of[stage + 1] == 0

    def forward_only(self) -> Schedule:
        """One update's table without its backwards, for evaluation: each rank's forwards in the same order."""
        batches = self.per_update
        order = tuple(tuple(a for a in row if a.op is Op.F and a.micro_batch < batches) for row in self.order)
        return replace(self, order=order, weights="flush")

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards: a table without them is for evaluation."""
        return any(action.op is not Op.F for row in self.order for action in row)

    def first(self, micro_batches: int) -> Schedule:
        """The table of the first so many micro-batches, the others left out: valid where the whole table is."""
        if micro_batches == self.per_update:
            return self
        order = tuple(tuple(action for action in row if action.micro_batch < micro_batches) for row in self.order)
        return replace(self, order=order)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(action.op is Op.I for row in self.order for action in row)

    def grid(self) -> str:
        """The table as text, a row a rank."""
        return "\n".join(f"rank {rank}   {' '.join(map(str, row))}" for rank, row in enumerate(self.order))


class StageTimes(NamedTuple):
    """Seconds that one micro-batch takes in a stage: what a schedule made for uneven stages looks at."""

    forward_s: float
    backward_s: float
    input_grad_s: float
    weight_grad_s: float


Maker = Callable[[Shape, Sequence[StageTimes]], Order]
"""A schedule's function: shape and stage times in, actions out. Must not depend on anything else."""


Ahead = Callable[[Shape], Sequence[int]]
"""How many forwards of each stage come before its first backward; see Kind."""


@cache
def place(how: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Which rank holds each stage when they are placed in a ``loop``, a ``v`` or ``two-way``."""
    forth = tuple(range(ranks))
    if how == TWO_WAY:
        return forth + forth[::-1]
    back = forth[::-1] if how == "v" else forth
    return tuple(rank for number in range(stages_per_rank) for rank in (back if number % 2 else forth))


@dataclass(frozen=True)
class Kind:
    """A named way to order actions.

    ``placement`` is ``loop`` (stage s on rank s mod p), ``v`` (rank r holds r and 2p−1−r, and so on with more
    stages: each pass over the ranks turns back where it ends) or ``two-way`` (two replicas of the model: stage s on
    rank s, and stage p + s, the same part of the model, on rank p−1−s). ``stages_per_rank`` lists the only numbers it
    takes, () meaning any; of a two-way pipeline one replica is counted. ``refuses`` says why a shape is impossible, or
    nothing. ``looks_at_times``: the order depends on the stages' seconds, on hops or on memory, not on the shape alone.
    ``weights`` is that of its Schedules. ``ahead`` is there where a rank has one stage and runs its F and B in turn,
    each in micro-batch order: of each stage, how many F come before the first B. ``also`` names other placements that
    it takes.
    """

    name: str
    make: Maker
    placement: str
    stages_per_rank: tuple[int, ...]
    refuses: Callable[[Shape], str | None]
    aliases: tuple[str, ...] = ()
    looks_at_times: bool = False
    weights: str = "flush"
    ahead: Ahead | None = None
    also: tuple[str, ...] = ()

    @property
    def asynchronous(self) -> bool:
        """Whether it trains on weights of different age."""
        return self.weights != "flush"

    @property
    def executor(self) -> str:
        """What runs it: ``torch``'s runtime, or our ``own``."""
        return "own" if self.asynchronous or self.placement == TWO_WAY else "torch"

    def takes(self, stages_per_rank: int) -> bool:
        """Whether it can run with so many stages on a rank."""
        return not self.stages_per_rank or stages_per_rank in self.stages_per_rank

    def place(self, ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
        """Which rank holds each stage. Raises UsageError for a number of stages that it does not take."""
        if not self.takes(stages_per_rank):
            allowed = " or ".join(map(str, self.stages_per_rank))
            what = "stage" if allowed == "1" else "stages"
            raise UsageError(f"{self.name} takes {allowed} {what} a rank, not {stages_per_rank}")
        return place(self.placement, ranks, stages_per_rank)

    def placements(self, ranks: int, stages_per_rank: int = 1) -> tuple[tuple[int, ...], ...]:
        """All ways to place the stages that it takes, its own first. Raises UsageError as ``place`` does."""
        others = (place(how, ranks, stages_per_rank) for how in self.also)
        return tuple(dict.fromkeys((self.place(ranks, stages_per_rank), *others)))

    def schedule(
        self,
        ranks: int,
        micro_batches: int,
        *,
        stages_per_rank: int = 1,
        times: Sequence[StageTimes] = (),
        hops_s: Sequence[float] = (),
        weight_part: float = 1.0,
        memory: StageMemory | None = None,
    ) -> Schedule:
        """The table for a shape; see Shape. Raises UsageError when the shape is impossible, with the reason.

        An asynchronous table takes ``micro_batches`` for each of its updates.
        """
        placement = self.place(ranks, stages_per_rank)
        shape = Shape(ranks, micro_batches, placement, tuple(hops_s), weight_part, memory)
        return self.table(shape, times)

    def table(self, shape: Shape, times: Sequence[StageTimes] = ()) -> Schedule:
        """As ``schedule``, for a shape whose placement is this schedule's."""
        reason = self.refuses(shape)
        if reason:
            where = f"{many(shape.micro_batches, 'micro-batch')} on {many(shape.ranks, 'rank')}"
            raise UsageError(f"{self.name} cannot run {where}: {reason}")
        uniform = [StageTimes(1.0, 2.0, 1.0, 1.0)] * shape.stages
        parts = tuple(range(shape.ranks)) * 2 if self.placement == TWO_WAY else ()
        order = self.make(shape, times or uniform)
        return Schedule(self.name, shape.placement, order, self.executor, parts, self.weights)


_KINDS: dict[str, Kind] = {}
_ALIASES: dict[str, str] = {}


def schedule(
    name: str,
    *,
    placement: str = "loop",
    stages_per_rank: Iterable[int] = (1,),
    refuses: Callable[[Shape], str | None] = lambda shape: None,
    aliases: Iterable[str] = (),
    looks_at_times: bool = False,
    weights: str = "flush",
    ahead: Ahead | None = None,
    also: Iterable[str] = (),
) -> Callable[[Maker], Maker]:
    """Register a function as the schedule ``name``; see Kind for the arguments."""

    def register(make: Maker) -> Maker:
        numbers, others = tuple(stages_per_rank), tuple(also)
        kind = Kind(name, make, placement, numbers, refuses, tuple(aliases), looks_at_times, weights, ahead, others)
        _KINDS[name] = kind
        _ALIASES.update({spelling.lower(): name for spelling in (name, *kind.aliases)})
        return make

    return register


def kinds(executor: str | None = None) -> tuple[Kind, ...]:
    """All registered schedules, by name, or those of one executor.

    Importing autopipe.schedules registers the shipped ones.
    """
    return tuple(_KINDS[name] for name in sorted(_KINDS) if executor in (None, _KINDS[name].executor))


def kind(name: str) -> Kind:
    """The schedule of that name or alias, in any case. Raises UsageError with the known names."""
    try:
        return _KINDS[_ALIASES[name.lower()]]
    except KeyError:
        known = ", ".join(k.name for k in kinds())
        raise UsageError(f"schedule {name!r} is not known: use one of {known}") from None
