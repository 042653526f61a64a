"""Annealing of an order: actions on the critical path change places with others of their rank, memory permitting.

A step can only get shorter when something on its critical path moves. So each try takes an action from that path and
moves it a few places, with a weight gradient ahead of it where memory asks for one; what makes the step longer by less
than a random threshold is kept, and the threshold falls to nothing (Dueck and Scheuer, 1990). The rows stay legal: F, I
and W of a micro-batch in this order, each stage's micro-batches in theirs. The loops are in moves.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from autopipe.core.schedule import Action, Op, Order, Shape, StageMemory, StageTimes
from autopipe.ordering import moves
from autopipe.ordering.compiled import compiled, numbers, same
from autopipe.ordering.rows import Listed, code_of

_FAR = 12
"""An action moves so many places at most."""

_WALKED = 2_000_000
"""So many actions are walked, about, between two looks at the clock: some hundredths of a second in machine code."""


class _Given(NamedTuple):
    """What does not change. ``starts`` are where the ranks' rows begin; all but ``caps`` is by an action's number.

    ``before`` is the action on another stage that an action waits for, ``behind`` the one that waits for it, −1 where
    there is none; ``hops`` the transfer to an action. Actions of one ``line`` keep their order, and so do those of one
    job, which is a micro-batch in a stage. ``homes`` are their ranks, ``adds`` what they add to memory.
    """

    starts: Any
    before: Any
    behind: Any
    seconds: Any
    hops: Any
    adds: Any
    lines: Any
    jobs: Any
    homes: Any
    caps: Any


class _State(NamedTuple):
    """The rows, now and at their best; what each place holds in memory, and which rank's it is.

    By an action's number: when it begins and ends, what it waits for, how long everything takes behind it, its place.
    ``critical`` is the critical path, ``spans`` the makespan now and at its best, ``random`` the state of the random
    numbers; ``heads``, ``at`` and ``free`` are used within a function.
    """

    rows: Any
    best: Any
    held: Any
    ranks: Any
    begins: Any
    ends: Any
    waits: Any
    afters: Any
    places: Any
    critical: Any
    spans: Any
    random: Any
    heads: Any
    at: Any
    free: Any


def annealed(
    found: Listed,
    times: Sequence[StageTimes],
    memory: StageMemory,
    *,
    tries: int,
    warm: float = 0.0005,
    seed: int = 0,
    fast: bool = False,
    enough: Callable[[float], bool] = lambda makespan_s: False,
) -> Listed:
    """The best order that ``tries`` moves reach from one that fits, or fewer where a makespan is ``enough``.

    Never a worse one than the given one. At first a step may get longer by up to the part ``warm``.
    """
    given, state = _given(found, times, memory, fast), _state(found, seed, fast)
    measure = _measure(fast)
    anneal = compiled(moves.anneal, *moves.HELPERS) if fast else moves.anneal
    state.spans[0] = state.spans[1] = begun = float(measure(given, state))
    part = max(1, _WALKED // len(state.rows) // (1 if fast else 10))
    for first in range(0, tries, part):
        if enough(float(state.spans[1])):
            break
        anneal(given, state, first, min(first + part, tries), tries, _FAR, warm)
    if not state.spans[1] < begun:
        return found
    state.rows[:] = state.best
    return _listed(found, given, state, float(measure(given, state)))


def evaluated(
    shape: Shape, order: Order, times: Sequence[StageTimes], memory: StageMemory, *, fast: bool = False
) -> Listed | None:
    """An order as list scheduling would return it; None where it does not fit in memory."""
    found = Listed(shape, tuple([code_of(action, shape.micro_batches) for action in row] for row in order), 0.0, 0.0)
    return measured(found, times, memory, fast=fast)


def measured(found: Listed, times: Sequence[StageTimes], memory: StageMemory, *, fast: bool = False) -> Listed | None:
    """Rows with their times; None where they do not fit in memory."""
    given, state = _given(found, times, memory, fast), _state(found, 0, fast)
    makespan = float(_measure(fast)(given, state))
    return _listed(found, given, state, makespan) if makespan >= 0 else None


def begin_times(found: Listed, times: Sequence[StageTimes], memory: StageMemory, *, fast: bool = False) -> list[float]:
    """When each action begins, by its number."""
    given, state = _given(found, times, memory, fast), _state(found, 0, fast)
    _measure(fast)(given, state)
    return [float(at) for at in state.begins]


def _measure(fast: bool) -> Callable[..., float]:
    return compiled(moves.measure, *moves.MEASURING) if fast else moves.measure


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


def _listed(found: Listed, given: _Given, state: _State, makespan_s: float) -> Listed:
    """The state's rows, which have been measured, with their times."""
    rows = tuple(state.rows[a:b] for a, b in pairwise(int(start) for start in given.starts))
    spans = (float(state.ends[row[-1]] - state.begins[row[0]]) for row in rows if len(row))
    return Listed(found.shape, rows, makespan_s, max(spans, default=0.0))


def _given(found: Listed, times: Sequence[StageTimes], memory: StageMemory, fast: bool) -> _Given:
    shape, batches = found.shape, found.shape.micro_batches
    seconds, adds, lines = [], [], []
    for s, t in enumerate(times):
        held, left = memory.after_forward[s], memory.after_input_grad[s]
        seconds += [t.forward_s, t.input_grad_s, t.weight_grad_s, t.backward_s]
        adds += [held, left - held, -left, -held]
        lines += [3 * s, 3 * s + 1, 3 * s + 2, 3 * s + 1]
    before = _before(found)
    behind = [-1] * len(before)
    for code, need in enumerate(before):
        if need >= 0:
            behind[need] = code
    hops = [*(shape.hops_s or (0.0,) * (shape.stages - 1)), 0.0]
    arriving = [hop for s in range(shape.stages) for hop in (hops[s - 1], hops[s], 0.0, hops[s])]

    def of(values: Sequence[float], *, whole: bool = False) -> Any:
        """A value of each kind of action, for each micro-batch."""
        return numbers([value for value in values for _ in range(batches)], fast=fast, whole=whole)

    return _Given(
        starts=numbers([*accumulate(map(len, found.rows), initial=0)], fast=fast, whole=True),
        before=numbers(before, fast=fast, whole=True),
        behind=numbers(behind, fast=fast, whole=True),
        seconds=of(seconds),
        hops=of(arriving),
        adds=of(adds),
        lines=of(lines, whole=True),
        jobs=numbers(
            [s * batches + b for s in range(shape.stages) for _ in range(4) for b in range(batches)],
            fast=fast,
            whole=True,
        ),
        homes=of([rank for rank in shape.placement for _ in range(4)], whole=True),
        caps=numbers([cap * (1 + 1e-9) for cap in memory.caps], fast=fast),
    )


def _before(found: Listed) -> list[int]:
    """By an action's number the one on the stage before, or behind for gradients, that it waits for; −1 for none."""
    batches, stages = found.shape.micro_batches, found.shape.stages
    here = {int(code) for row in found.rows for code in row}
    before = [-1] * (4 * stages * batches)
    for code in here:
        kind, batch = divmod(code, batches)
        stage, op = divmod(kind, 4)
        if op == 0 and stage > 0:
            before[code] = code - 4 * batches
        elif op % 2 == 1 and stage + 1 < stages:
            split = (4 * stage + 5) * batches + batch
            before[code] = split if split in here else split + 2 * batches
    return before


def _state(found: Listed, seed: int, fast: bool) -> _State:
    rows = [int(code) for row in found.rows for code in row]
    size, count, ranks = 4 * found.shape.stages * found.shape.micro_batches, len(rows), found.shape.ranks

    def whole(values: Sequence[float]) -> Any:
        return numbers(values, fast=fast, whole=True)

    def none(number: int) -> Any:
        return same(0.0, number, fast=fast)

    return _State(
        rows=whole(rows),
        best=whole(rows),
        held=none(count),
        ranks=whole([rank for rank, row in enumerate(found.rows) for _ in row]),
        begins=none(size),
        ends=none(size),
        waits=same(0, size, fast=fast, whole=True),
        afters=none(size),
        places=same(0, size, fast=fast, whole=True),
        critical=same(0, size, fast=fast, whole=True),
        spans=none(2),
        random=whole([seed % 2147483646 + 1]),
        heads=none(count),
        at=same(0, ranks, fast=fast, whole=True),
        free=none(ranks),
    )
