"""Annealing of an order: actions on the critical path change places with others of their rank, memory permitting.

A step can only get shorter when something on its critical path moves. So each try takes an action from that path and
moves it a few places, with a weight gradient ahead of it where memory asks for one; what makes the step longer by less
than a random threshold is kept, and the threshold falls to nothing (Dueck and Scheuer, 1990). The rows stay legal: F, I
and W of a micro-batch in this order, each stage's micro-batches in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from autopipe.core.schedule import Action, Op, Order, Shape, StageMemory, StageTimes
from autopipe.ordering.compiled import compiled, numbers, same
from autopipe.ordering.rows import Listed, code_of

_FAR = 12
"""An action moves so many places at most."""

_WARM = 0.0005
"""At first a step may get longer by up to this part."""


class _Given(NamedTuple):
    """Sizes, seconds and bytes by 4 · stage + operation, hops, caps. ``starts`` are where the ranks' rows begin."""

    batches: int
    stages: int
    starts: Any
    seconds: Any
    hops: Any
    adds: Any
    caps: Any


class _State(NamedTuple):
    """The rows, when actions end and what they wait for, the critical path, and the state of the random numbers.

    ``at`` and ``free`` are where each rank is in its row, and when it is free.
    """

    rows: Any
    best: Any
    ends: Any
    waits: Any
    places: Any
    ranks: Any
    critical: Any
    random: Any
    at: Any
    free: Any


def annealed(
    found: Listed, times: Sequence[StageTimes], memory: StageMemory, *, tries: int, seed: int = 0, fast: bool = False
) -> Listed:
    """The best order that ``tries`` moves reach from one that fits; never a worse one."""
    given, state = _given(found, times, memory, fast), _state(found, seed, fast)
    run = compiled(_anneal, _random, _evaluate, _trace, _legal, _shift, _fits, _room, _back, _move) if fast else _anneal
    if not run(given, state, tries, _FAR, _WARM) < found.makespan_s:
        return found
    state.rows[:] = state.best
    return _measured(found, given, state, fast)


def evaluated(
    shape: Shape, order: Order, times: Sequence[StageTimes], memory: StageMemory, *, fast: bool = False
) -> Listed | None:
    """An order as list scheduling would return it; None where it does not fit in memory."""
    found = Listed(shape, tuple([code_of(action, shape.micro_batches) for action in row] for row in order), 0.0, 0.0)
    given, state = _given(found, times, memory, fast), _state(found, 0, fast)
    fits = compiled(_fits) if fast else _fits
    if not all(fits(given, state, rank) for rank in range(shape.ranks)):
        return None
    return _measured(found, given, state, fast)


def merged(found: Listed, times: Sequence[StageTimes], memory: StageMemory) -> Listed:
    """The order with I and W in one B where W comes right behind I and B is shorter; the same one if that is longer."""
    if all(t.backward_s >= t.input_grad_s + t.weight_grad_s for t in times):
        return found
    rows = []
    for row in found.order:
        kept: list[Action] = []
        for action in row:
            t = times[action.stage]
            behind = kept and kept[-1] == action._replace(op=Op.I) and action.op is Op.W
            if behind and t.backward_s < t.input_grad_s + t.weight_grad_s:
                kept[-1] = action._replace(op=Op.B)
            else:
                kept.append(action)
        rows.append(tuple(kept))
    made = evaluated(found.shape, tuple(rows), times, memory)
    return made if made and made.makespan_s < found.makespan_s else found


def _measured(found: Listed, given: _Given, state: _State, fast: bool) -> Listed:
    """The state's rows with their times."""
    makespan = (compiled(_evaluate) if fast else _evaluate)(given, state)
    rows = tuple(state.rows[a:b] for a, b in pairwise(int(start) for start in given.starts))
    spans = [_span_s(given, state, row) for row in rows]
    return Listed(found.shape, rows, float(makespan), max(spans))


def _span_s(given: _Given, state: _State, row: Sequence[int]) -> float:
    """From a rank's first start to its end."""
    return float(state.ends[row[-1]] - state.ends[row[0]] + given.seconds[row[0] // given.batches])


def _given(found: Listed, times: Sequence[StageTimes], memory: StageMemory, fast: bool) -> _Given:
    shape = found.shape
    seconds, adds = [], []
    for s, t in enumerate(times):
        held, left = memory.after_forward[s], memory.after_input_grad[s]
        seconds += [t.forward_s, t.input_grad_s, t.weight_grad_s, t.backward_s]
        adds += [held, left - held, -left, -held]
    return _Given(
        batches=shape.micro_batches,
        stages=shape.stages,
        starts=numbers([*accumulate(map(len, found.rows), initial=0)], fast=fast, whole=True),
        seconds=numbers(seconds, fast=fast),
        hops=numbers([*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0], fast=fast),
        adds=numbers(adds, fast=fast),
        caps=numbers([cap * (1 + 1e-9) for cap in memory.caps], fast=fast),
    )


def _state(found: Listed, seed: int, fast: bool) -> _State:
    rows = [int(code) for row in found.rows for code in row]
    size = 4 * found.shape.stages * found.shape.micro_batches
    ranks = [rank for rank, row in enumerate(found.rows) for _ in row]
    return _State(
        rows=numbers(rows, fast=fast, whole=True),
        best=numbers(rows, fast=fast, whole=True),
        ends=same(0.0, size, fast=fast),
        waits=same(0, size, fast=fast, whole=True),
        places=same(0, size, fast=fast, whole=True),
        ranks=numbers(ranks, fast=fast, whole=True),
        critical=same(0, size, fast=fast, whole=True),
        random=numbers([seed % 2147483646 + 1], fast=fast, whole=True),
        at=same(0, found.shape.ranks, fast=fast, whole=True),
        free=same(0.0, found.shape.ranks, fast=fast),
    )


def _random(state: Any, below: int) -> int:
    """A number from 0 to ``below`` − 1 (Park and Miller's generator)."""
    state.random[0] = state.random[0] * 48271 % 2147483647
    return int(state.random[0] // 64 % below)


def _evaluate(given: Any, state: Any) -> float:
    """When the last action ends, or −1 where actions wait for each other. Leaves what each one waited for."""
    batches, ranks, at, free = given.batches, len(given.caps), state.at, state.free
    for n in range(len(state.ends)):
        state.ends[n] = -1.0
    for r in range(ranks):
        at[r], free[r] = given.starts[r], 0.0
    left, moved = len(state.rows), True
    while moved:
        moved = False
        for r in range(ranks):
            while at[r] < given.starts[r + 1]:
                code = state.rows[at[r]]
                kind = code // batches
                s, op, b = kind // 4, kind % 4, code % batches
                need, hop = -1, 0.0
                if op == 0 and s > 0:
                    need, hop = code - 4 * batches, given.hops[s - 1]
                elif op % 2 == 1 and s + 1 < given.stages:
                    need, hop = (4 * s + 5) * batches + b, given.hops[s]
                    if state.ends[need] < 0:
                        need += 2 * batches
                begin, wait = free[r], -1
                if need >= 0:
                    if state.ends[need] < 0:
                        break
                    if state.ends[need] + hop > begin:
                        begin, wait = state.ends[need] + hop, need
                if wait < 0 and at[r] > given.starts[r]:
                    wait = state.rows[at[r] - 1]
                free[r] = begin + given.seconds[kind]
                state.ends[code], state.waits[code], state.places[code] = free[r], wait, at[r]
                at[r] += 1
                left -= 1
                moved = True
    if left > 0:
        return -1.0
    end = 0.0
    for r in range(ranks):
        end = max(end, free[r])
    return end


def _trace(given: Any, state: Any) -> int:
    """The critical path as places in the rows, and its length."""
    code = state.rows[given.starts[1] - 1]
    for r in range(len(given.caps)):
        last = state.rows[given.starts[r + 1] - 1]
        if state.ends[last] > state.ends[code]:
            code = last
    count = 0
    while code >= 0:
        state.critical[count] = state.places[code]
        count += 1
        code = state.waits[code]
    return count


def _legal(given: Any, state: Any, source: int, target: int) -> bool:
    """Whether the action at ``source`` may pass all others up to ``target``: of its stage only other micro-batches'."""
    batches, code = given.batches, state.rows[source]
    stage, b, op = code // batches // 4, code % batches, code // batches % 4
    step = 1 if target > source else -1
    place = source
    while place != target:
        place += step
        other = state.rows[place]
        if other // batches // 4 == stage:
            other_op = other // batches % 4
            if other % batches == b or other_op == op or (op % 2 == 1 and other_op % 2 == 1):
                return False
    return True


def _shift(state: Any, source: int, target: int) -> None:
    """Move one action to another place of its row."""
    code, step = state.rows[source], 1 if target > source else -1
    place = source
    while place != target:
        state.rows[place] = state.rows[place + step]
        place += step
    state.rows[target] = code


def _fits(given: Any, state: Any, rank: int) -> bool:
    """Whether a rank's row fits in its memory."""
    held = 0.0
    for place in range(given.starts[rank], given.starts[rank + 1]):
        held += given.adds[state.rows[place] // given.batches]
        if held > given.caps[rank]:
            return False
    return True


def _room(given: Any, state: Any, rank: int, target: int) -> int:
    """Bring the next weight gradient behind a place to that place; where it came from, 0 where none may."""
    for place in range(target + 1, given.starts[rank + 1]):
        if state.rows[place] // given.batches % 4 == 2:
            if not _legal(given, state, place, target):
                return 0
            _shift(state, place, target)
            return place
    return 0


def _move(given: Any, state: Any, rank: int, source: int, target: int) -> int:
    """Move an action, and where memory asks for it a weight gradient before it.

    Where that one came from, 0 where none is needed, −1 where it does not fit and all is as before.
    """
    _shift(state, source, target)
    if _fits(given, state, rank):
        return 0
    came = _room(given, state, rank, target)
    if came > 0 and _fits(given, state, rank):
        return came
    _back(state, source, target, came)
    return -1


def _back(state: Any, source: int, target: int, came: int) -> None:
    """Undo a move."""
    if came > 0:
        _shift(state, target, came)
    _shift(state, target, source)


def _anneal(given: Any, state: Any, tries: int, far: int, warm: float) -> float:
    current = _evaluate(given, state)
    best = current
    count = _trace(given, state)
    for n in range(tries):
        source = state.critical[_random(state, count)]
        rank = state.ranks[source]
        by = 1 + _random(state, far) * _random(state, far) // far
        target = source + by if _random(state, 2) == 1 else source - by
        if target < given.starts[rank] or target >= given.starts[rank + 1]:
            continue
        if not _legal(given, state, source, target):
            continue
        came = _move(given, state, rank, source, target)
        if came < 0:
            continue
        makespan = _evaluate(given, state)
        slack = warm * best * (1.0 - n / tries) ** 2 * _random(state, 1000) / 1000
        if makespan < 0 or makespan > current + slack:
            _back(state, source, target, came)
            continue
        current = makespan
        count = _trace(given, state)
        if current < best * (1 - 1e-12):
            best = current
            for place in range(len(state.rows)):
                state.best[place] = state.rows[place]
    return best
