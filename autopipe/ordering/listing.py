"""List scheduling: every rank, whenever it is free, takes the most urgent action that is there and fits in its memory.

How urgent an action is, is a number, ``key + micro-batch · period``, least first: a building block that repeats. Weight
gradients fill the gaps. There are two ways not to get stuck in memory:

- ``strict``: a rank follows its keys, and takes another action first only where its value has not come and where
  following the keys from there still fits. That needs a block that fits.
- else: a rank takes what is there, and keeps room for its oldest micro-batch, which therefore gets through, and then
  the next one (the banker's rule). That fits with any keys, and wastes memory.

Actions are started in the order of time over all ranks, so no decision knows of anything later than itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from autopipe.core.schedule import Shape, StageMemory, StageTimes
from autopipe.ordering import turns
from autopipe.ordering.compiled import compiled, numbers, same
from autopipe.ordering.rows import Listed


@dataclass(frozen=True)
class Rules:
    """What decides between actions.

    ``forward_keys`` and ``backward_keys`` are per stage. ``windows``: seconds that a rank waits for a more urgent
    action, by its micro-batch, not for ``strict`` ones. ``fill``: a weight gradient runs in a gap of at least that part
    of its time (0: in any). ``pull``: likewise other actions in a strict order, always where it is not known when the
    gap ends (inf: only then; below 0: never). ``balance``: a weight gradient also runs where waiting would make this
    rank idle longer than any other. ``most``: so many micro-batches may be between F and I, by stage. ``whole``:
    stages whose backward is not split. ``turns``: when each micro-batch's turn comes, in periods, else its number.
    """

    forward_keys: tuple[float, ...]
    backward_keys: tuple[float, ...]
    period: float
    windows: tuple[float, ...] = ()
    fill: float = 0.0
    strict: bool = False
    pull: float = 1.0
    balance: bool = False
    most: tuple[float, ...] = ()
    whole: tuple[bool, ...] = ()
    turns: tuple[float, ...] = ()


class _Given(NamedTuple):
    """What does not change. ``owns[starts[r] : starts[r + 1]]`` are the stages of rank r."""

    batches: int
    placement: Any
    starts: Any
    owns: Any
    forward: Any
    back: Any
    weight: Any
    hops: Any
    whole: Any
    forward_keys: Any
    back_keys: Any
    turns: Any
    windows: Any
    fill: float
    strict: bool
    pull: float
    balance: bool
    most: Any
    after_forward: Any
    after_back: Any
    extra: Any
    caps: Any


class _State(NamedTuple):
    """What changes: per value when it arrives; per stage what is done; per rank the rest.

    ``waiting`` has each rank's queue of weight gradients, by stage, from ``first`` to ``last``.
    """

    arrives_f: Any
    arrives_b: Any
    forwards: Any
    backs: Any
    weights: Any
    ahead_f: Any
    ahead_b: Any
    free: Any
    held: Any
    idle: Any
    waiting: Any
    first: Any
    last: Any
    oldest: Any
    rows: Any
    lengths: Any
    codes: Any
    begins: Any


def listed(
    shape: Shape, times: Sequence[StageTimes], memory: StageMemory, rules: Rules, *, fast: bool = False
) -> Listed | None:
    """The order that the rules give, by machine code where ``fast``; None where memory keeps it from its end."""
    whole = rules.whole or (False,) * shape.stages
    owns = [shape.stages_of(rank) for rank in range(shape.ranks)]
    starts = [0, *accumulate(map(len, owns))]
    given, state = _given(shape, times, memory, rules, whole, owns, starts, fast), _state(shape, fast)
    run = compiled(turns.run, *turns.HELPERS) if fast else turns.run
    makespan = run(given, state)
    if makespan < 0:
        return None
    width = 3 * shape.micro_batches
    rows = [state.rows[width * starts[r] :][: state.lengths[r]] for r in range(shape.ranks)]
    stage_times = [
        state.idle[rank] + shape.micro_batches * sum(given.forward[s] + given.back[s] + given.weight[s] for s in own)
        for rank, own in enumerate(owns)
    ]
    return Listed(shape, tuple(rows), float(makespan), float(max(stage_times)))


def _given(
    shape: Shape,
    times: Sequence[StageTimes],
    memory: StageMemory,
    rules: Rules,
    whole: Sequence[bool],
    owns: Sequence[Sequence[int]],
    starts: Sequence[int],
    fast: bool,
) -> _Given:
    def of(values: Sequence[float], *, whole: bool = False) -> Any:
        return numbers(values, fast=fast, whole=whole)

    after_back = [0.0 if one else held for held, one in zip(memory.after_input_grad, whole, strict=True)]
    turns = rules.turns or range(shape.micro_batches)
    extra = [max(0.0, i - f) for f, i in zip(memory.after_forward, after_back, strict=True)]
    return _Given(
        batches=shape.micro_batches,
        placement=of(shape.placement, whole=True),
        starts=of(starts, whole=True),
        owns=of([stage for own in owns for stage in own], whole=True),
        forward=of([t.forward_s for t in times]),
        back=of([t.backward_s if one else t.input_grad_s for t, one in zip(times, whole, strict=True)]),
        weight=of([0.0 if one else t.weight_grad_s for t, one in zip(times, whole, strict=True)]),
        hops=of([*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0]),
        whole=of(whole, whole=True),
        forward_keys=of(rules.forward_keys),
        back_keys=of(rules.backward_keys),
        turns=of([rules.period * turn for turn in (*turns, 0.0)]),
        windows=of(rules.windows or (0.0,) * shape.micro_batches),
        fill=float(rules.fill),
        strict=rules.strict,
        pull=float(rules.pull),
        balance=rules.balance,
        most=of(rules.most or (inf,) * shape.stages),
        after_forward=of(memory.after_forward),
        after_back=of(after_back),
        extra=of([max(extra[stage] for stage in own) for own in owns]),
        caps=of([cap * (1 + 1e-9) for cap in memory.caps]),
    )


def _state(shape: Shape, fast: bool) -> _State:
    def zeros(count: int, *, whole: bool = True) -> Any:
        return same(0, count, fast=fast, whole=whole) if whole else same(0.0, count, fast=fast)

    size = shape.stages * shape.micro_batches
    never = same(turns.NEVER, size, fast=fast)
    arrives_f = never.copy()
    arrives_f[: shape.micro_batches] = same(0.0, shape.micro_batches, fast=fast)
    return _State(
        arrives_f=arrives_f,
        arrives_b=never,
        forwards=zeros(shape.stages),
        backs=zeros(shape.stages),
        weights=zeros(shape.stages),
        ahead_f=zeros(shape.stages),
        ahead_b=zeros(shape.stages),
        free=zeros(shape.ranks, whole=False),
        held=zeros(shape.ranks, whole=False),
        idle=zeros(shape.ranks, whole=False),
        waiting=zeros(size),
        first=zeros(shape.ranks),
        last=zeros(shape.ranks),
        oldest=zeros(shape.ranks),
        rows=zeros(3 * size),
        lengths=zeros(shape.ranks),
        codes=zeros(shape.ranks),
        begins=zeros(shape.ranks, whole=False),
    )
