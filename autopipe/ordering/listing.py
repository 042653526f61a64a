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
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

from autopipe.core.schedule import Action, Op, Order, Shape, StageMemory, StageTimes
from autopipe.ordering.compiled import compiled, numbers, same

_NEVER = 1e300


@dataclass(frozen=True)
class Rules:
    """What decides between actions.

    ``forward_keys`` and ``backward_keys`` are per stage. ``window``: seconds that a rank waits for a more urgent
    action, not for ``strict`` ones. ``fill``: a weight gradient runs in a gap of at least that part of its time (0: in
    any). ``pull``: likewise other actions in a strict order, always where it is not known when the gap ends (inf: only
    then; below 0: never). ``balance``: a weight gradient also runs where
    waiting would make this rank idle longer than any other. ``most``: so many micro-batches may be between F and I, per
    stage. ``whole``: stages whose backward is not split.
    """

    forward_keys: tuple[float, ...]
    backward_keys: tuple[float, ...]
    period: float
    window: float = 0.0
    fill: float = 0.0
    strict: bool = False
    pull: float = 1.0
    balance: bool = False
    most: tuple[float, ...] = ()
    whole: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Listed:
    """What list scheduling made: each rank's row, as numbers.

    ``stage_time_s`` is the longest time of a rank from its first start to its end.
    """

    shape: Shape
    rows: tuple[Any, ...]
    makespan_s: float
    stage_time_s: float

    @cached_property
    def order(self) -> Order:
        """The actions."""
        rows = [row if isinstance(row, list) else row.tolist() for row in self.rows]
        return tuple(tuple(action_of(code, self.shape.micro_batches) for code in row) for row in rows)


OPS = (Op.F, Op.I, Op.W, Op.B)
"""The operations in the order of their numbers."""


def action_of(code: int, batches: int) -> Action:
    """The action of a number, (4 · stage + operation) · micro-batches + micro-batch."""
    kind, batch = divmod(code, batches)
    return Action(kind // 4, OPS[kind % 4], batch)


def code_of(action: Action, batches: int) -> int:
    """The number of an action."""
    return (4 * action.stage + OPS.index(action.op)) * batches + action.micro_batch


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
    period: float
    window: float
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


def listed(
    shape: Shape, times: Sequence[StageTimes], memory: StageMemory, rules: Rules, *, fast: bool = False
) -> Listed | None:
    """The order that the rules give, by machine code where ``fast``; None where memory keeps it from its end."""
    whole = rules.whole or (False,) * shape.stages
    owns = [shape.stages_of(rank) for rank in range(shape.ranks)]
    starts = [0, *accumulate(map(len, owns))]
    given, state = _given(shape, times, memory, rules, whole, owns, starts, fast), _state(shape, fast)
    run = compiled(_run, *_HELPERS) if fast else _run
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
        period=float(rules.period),
        window=float(rules.window),
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
    never = same(_NEVER, size, fast=fast)
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
    )


def _back_fits(given: Any, state: Any, rank: int, stage: int) -> bool:
    """Whether I may add what it adds to the rank's memory."""
    after = state.held[rank] + given.after_back[stage] - given.after_forward[stage]
    return bool(after <= given.caps[rank])


def _most_urgent(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """The most urgent action that has come, or comes within the window, or else the next to come; and when."""
    now, batches = state.free[rank], given.batches
    reserve = given.extra[rank]
    for n in range(given.starts[rank], given.starts[rank + 1]):
        if state.forwards[given.owns[n]] <= state.oldest[rank]:
            reserve += given.after_forward[given.owns[n]]
    best, best_at, best_key, soon, soon_at = -1, _NEVER, _NEVER, -1, _NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        for op in range(2):
            b = state.backs[s] if op else state.forwards[s]
            if b >= batches:
                continue
            at = state.arrives_b[s * batches + b] if op else state.arrives_f[s * batches + b]
            if at >= soon_at and at > now + given.window:
                continue
            if op:
                if not _back_fits(given, state, rank, s):
                    continue
                key = given.back_keys[s] + b * given.period
            else:
                need = state.held[rank] + reserve
                if b > state.oldest[rank]:
                    need += given.after_forward[s]
                if need > given.caps[rank] or b - state.backs[s] >= given.most[s]:
                    continue
                key = given.forward_keys[s] + b * given.period
            if at <= now + given.window and key < best_key:
                best, best_at, best_key = 3 * s + op, at, key
            if at < soon_at:
                soon, soon_at = 3 * s + op, at
    if best < 0:
        return soon, soon_at
    return best, best_at


def _in_turn(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """The action whose turn it is; another one that is there, where that one has not come."""
    batches = given.batches
    turn, turn_key = -1, _NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        if state.forwards[s] < batches:
            key = given.forward_keys[s] + state.forwards[s] * given.period
            if key < turn_key:
                turn, turn_key = 3 * s, key
        if state.backs[s] < batches:
            key = given.back_keys[s] + state.backs[s] * given.period
            if key < turn_key:
                turn, turn_key = 3 * s + 1, key
    if turn < 0:
        return -1, _NEVER
    s = turn // 3
    at = _NEVER
    if turn % 3 == 1:
        if state.backs[s] < state.forwards[s] and _back_fits(given, state, rank, s):
            at = state.arrives_b[s * batches + state.backs[s]]
    elif state.held[rank] + given.after_forward[s] <= given.caps[rank]:
        at = state.arrives_f[s * batches + state.forwards[s]]
    if at <= state.free[rank]:
        return turn, at
    other = _pulled(given, state, rank, at) if given.pull >= 0 else -1
    return (other, state.free[rank]) if other >= 0 else (turn, at)


def _pulled(given: Any, state: Any, rank: int, until: float) -> int:
    """The most urgent action that is there and may come before its turn, in the time ``until`` the one in turn."""
    now, batches = state.free[rank], given.batches
    best, best_key = -1, _NEVER
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        b = state.backs[s]
        if b < state.forwards[s] and state.arrives_b[s * batches + b] <= now:
            key = given.back_keys[s] + b * given.period
            fits = until >= _NEVER or now + given.pull * given.back[s] <= until
            if fits and key < best_key and _back_fits(given, state, rank, s):
                best, best_key = 3 * s + 1, key
        b = state.forwards[s]
        if b < batches and state.arrives_f[s * batches + b] <= now:
            key = given.forward_keys[s] + b * given.period
            fits = until >= _NEVER or now + given.pull * given.forward[s] <= until
            fits = fits and key < best_key and state.held[rank] + given.after_forward[s] <= given.caps[rank]
            if fits and _gets_through(given, state, rank, s, key):
                best, best_key = 3 * s, key
    return best


def _gets_through(given: Any, state: Any, rank: int, early: int, key: float) -> bool:
    """Whether a rank that runs a forward of stage ``early`` now can follow its keys up to that action's turn."""
    level = given.after_forward[early] + given.extra[rank]
    for n in range(given.starts[rank], given.starts[rank + 1]):
        s = given.owns[n]
        state.ahead_f[s], state.ahead_b[s] = state.forwards[s], state.backs[s]
        level += (state.forwards[s] - state.backs[s]) * given.after_forward[s]
    while level <= given.caps[rank]:
        least, which = key, -1
        for n in range(given.starts[rank], given.starts[rank + 1]):
            s = given.owns[n]
            forward = given.forward_keys[s] + state.ahead_f[s] * given.period
            if state.ahead_f[s] < given.batches and forward < least:
                least, which = forward, 2 * s
            back = given.back_keys[s] + state.ahead_b[s] * given.period
            if state.ahead_b[s] < given.batches and back < least:
                least, which = back, 2 * s + 1
        if which < 0:
            return True
        s = which // 2
        if which % 2 == 0:
            state.ahead_f[s] += 1
            level += given.after_forward[s]
        else:
            state.ahead_b[s] += 1
            level -= given.after_forward[s]
    return False


def _weight_fits(given: Any, state: Any, rank: int, begin: float) -> bool:
    """Whether the rank's next weight gradient should fill the gap before ``begin``."""
    gap = begin - state.free[rank]
    if gap <= 0:
        return False
    s = state.waiting[given.starts[rank] * given.batches + state.first[rank]]
    if gap >= given.fill * given.weight[s]:
        return True
    if not given.balance:
        return False
    longest = 0.0
    for k in range(len(state.idle)):
        longest = max(longest, state.idle[k])
    return bool(gap > longest - state.idle[rank])


def _pick(given: Any, state: Any, rank: int) -> tuple[int, float]:
    """What the rank would do next as far as it knows, as 3 · stage + (0 F, 1 I or B, 2 W), and when."""
    code, at = _in_turn(given, state, rank) if given.strict else _most_urgent(given, state, rank)
    begin = max(state.free[rank], at)
    if state.last[rank] > state.first[rank] and _weight_fits(given, state, rank, begin):
        stage = state.waiting[given.starts[rank] * given.batches + state.first[rank]]
        return 3 * stage + 2, state.free[rank]
    return code, begin


def _start(given: Any, state: Any, rank: int, code: int, begin: float) -> int:
    """Run the action; the rank that its value goes to, or its own."""
    s, op = code // 3, code % 3
    batches, other, b = given.batches, rank, 0
    if state.lengths[rank] > 0:
        state.idle[rank] += begin - state.free[rank]
    if op == 0:
        b = state.forwards[s]
        state.forwards[s] += 1
        state.free[rank] = begin + given.forward[s]
        state.held[rank] += given.after_forward[s]
        if s + 1 < len(given.forward):
            state.arrives_f[(s + 1) * batches + b] = state.free[rank] + given.hops[s]
            other = given.placement[s + 1]
        else:
            state.arrives_b[s * batches + b] = state.free[rank]
    elif op == 1:
        b = state.backs[s]
        state.backs[s] += 1
        state.free[rank] = begin + given.back[s]
        state.held[rank] += given.after_back[s] - given.after_forward[s]
        if s > 0:
            state.arrives_b[(s - 1) * batches + b] = state.free[rank] + given.hops[s - 1]
            other = given.placement[s - 1]
        if given.whole[s]:
            state.weights[s] += 1
        else:
            state.waiting[given.starts[rank] * batches + state.last[rank]] = s
            state.last[rank] += 1
    else:
        b = state.weights[s]
        state.weights[s] += 1
        state.free[rank] = begin + given.weight[s]
        state.held[rank] -= given.after_back[s]
        state.first[rank] += 1
    done = batches
    for n in range(given.starts[rank], given.starts[rank + 1]):
        done = min(done, state.weights[given.owns[n]])
    state.oldest[rank] = done
    kind = 4 * s + (3 if op == 1 and given.whole[s] else op)
    state.rows[3 * batches * given.starts[rank] + state.lengths[rank]] = kind * batches + b
    state.lengths[rank] += 1
    return int(other)


def _run(given: Any, state: Any) -> float:
    """Start all actions; when the last one ends, or −1 where no rank can go on."""
    ranks, left = len(given.caps), 0
    for s in range(len(given.forward)):
        left += given.batches * (2 if given.whole[s] else 3)
    codes, begins = [0] * ranks, [0.0] * ranks
    for rank in range(ranks):
        codes[rank], begins[rank] = _pick(given, state, rank)
    while left > 0:
        rank = 0
        for r in range(ranks):
            if begins[r] < begins[rank]:
                rank = r
        if begins[rank] >= _NEVER:
            return -1.0
        other = _start(given, state, rank, codes[rank], begins[rank])
        codes[rank], begins[rank] = _pick(given, state, rank)
        if other != rank:
            codes[other], begins[other] = _pick(given, state, other)
        left -= 1
    end = 0.0
    for rank in range(ranks):
        end = max(end, state.free[rank])
    return end


_HELPERS: tuple[Any, ...] = (
    _back_fits,
    _most_urgent,
    _gets_through,
    _pulled,
    _in_turn,
    _weight_fits,
    _pick,
    _start,
)
