"""Graphs of orders: when every action of a schedule ends, for one set of costs or thousands at once.

An action starts when its rank is free and its value has arrived, and takes its stage's seconds and the overhead. A
transfer starts when its value is made, takes its link's time for its bytes, and disturbs nothing else; over a wire that
links share it waits for those before it (autopipe/wires.py). So an action waits for at most two others, and the end of
each is a longest path. Where torch asks for a value only right before it is needed, and its sender is then computing,
the receiver waits for Link.late_s more. ``Graph`` holds an order in levels of actions that do not wait for each other;
``Graph.ends`` walks the levels.

An asynchronous table has no step with a start and an end: its step is the period, the time from one optimizer step to
the next in the steady part of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.core.cluster import Link
from autopipe.core.lowering import posted_last
from autopipe.core.periodic import steady
from autopipe.core.schedule import Action, Op, Schedule
from autopipe.core.stage import StageCost
from autopipe.core.validation import sequence, values
from autopipe.wires import Flow, Wires, queued_ends, wires_of

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

OPS = (Op.F, Op.B, Op.I, Op.W)
"""The compute operations in the order of ``Costs.actions_s``."""

_CHUNK = 250
"""Candidates that are walked together: enough to fill numpy's loops, few enough to stay in the cache."""

_MOST = 4_000_000
"""Numbers that are held at once; orders of many actions are walked with fewer candidates together."""


class Costs(NamedTuple):
    """The seconds of n candidates (one candidate a column) for one order.

    ``actions_s`` has shape (4 · stages, n): F, B, I and W of stage 0, then of stage 1, …, overhead included.
    ``transfers_s`` has shape (2 · stages, n): row s is the activation that stage s receives, row stages + s the
    gradient that it receives. ``optimizer_s`` has shape (stages, n): what follows a rank's row, the reduction of its
    gradients over replicas included. ``late_s`` has shape (2 · stages), the same for all candidates: what an action
    waits that asks late, by the row of its transfer. ``wires`` says which transfers share one, None where none do.
    """

    actions_s: Floats
    transfers_s: Floats
    optimizer_s: Floats
    late_s: Floats
    wires: Wires | None = None

    def columns(self, part: slice) -> Costs:
        """Some of the candidates."""
        actions, transfers, optimizer = (np.ascontiguousarray(field[:, part]) for field in self[:3])
        return Costs(actions, transfers, optimizer, self.late_s, self.wires)


class _Level(NamedTuple):
    """Actions that do not wait for each other, as row numbers: theirs, what they wait for, their costs."""

    rows: slice
    before: Indices
    source: Indices
    transfer: Indices
    cost: Indices


class _Ask(NamedTuple):
    """An action that asks for its value right before it runs, as row numbers, and the rank that makes it."""

    row: int
    before: int
    transfer: int
    sender: int


@dataclass(frozen=True)
class Graph:
    """An order, ready to be walked.

    Row 0 of the ends is the start of the step; ``rows[rank]`` are the rows of the rank's actions in their order.
    ``costs`` is for each row the row of its seconds. ``make`` gives the order itself; ``trains`` tells whether it
    has backwards.
    """

    make: Callable[[], Schedule]
    placement: tuple[int, ...]
    levels: tuple[_Level, ...]
    rows: tuple[Indices, ...]
    costs: Indices
    trains: bool = True
    asynchronous: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        """The order; only late receives need it."""
        return self.make()

    @cached_property
    def asks(self) -> tuple[_Ask, ...]:
        """The actions that may wait for a busy sender, by sender."""
        last = posted_last(self.schedule) if self.schedule.executor == "torch" else frozenset()
        found = []
        for rank, actions in enumerate(self.schedule.order):
            for number, action in enumerate(actions):
                if action in last:
                    row = int(self.rows[rank][number])
                    before = int(self.rows[rank][number - 1]) if number else 0
                    transfer = action.stage + self.schedule.stages * (action.op is not Op.F)
                    found.append(_Ask(row, before, transfer, _sender(action, self.schedule)))
        return tuple(sorted(found, key=lambda ask: ask.sender))

    @classmethod
    def of(cls, schedule: Schedule) -> Graph:
        """The graph of a schedule. Raises ScheduleError where actions wait for each other."""
        numbers = values(schedule)
        starts = np.cumsum([1, *map(len, numbers)])
        maker = np.zeros(2 * schedule.stages * schedule.micro_batches + 1, np.intp)  # the last one, −1, is no value
        depth, before, source = np.zeros((3, starts[-1]), np.intp).tolist()
        for rank, place in sequence(schedule):
            mine, (made, needed) = int(starts[rank]) + place, numbers[rank][place]
            before[mine], source[mine] = mine - 1 if place else 0, int(maker[needed])
            depth[mine] = 1 + max(depth[before[mine]], depth[source[mine]])
            if made >= 0:
                maker[made] = mine
        by_depth = np.argsort(depth, kind="stable")
        row = np.argsort(by_depth)
        flat = [action for actions in schedule.order for action in actions]
        transfer = [0, *(stage + schedule.stages * (op is not Op.F) for stage, op, _ in flat)]
        cost = [0, *(_cost_row(action, schedule.stages) for action in flat)]
        columns = [row[before], row[source], np.array(transfer, np.intp), np.array(cost, np.intp)]
        firsts = np.searchsorted(np.array(depth)[by_depth], np.arange(1, max(depth) + 2))
        levels = (_Level(slice(a, b), *(column[by_depth[a:b]] for column in columns)) for a, b in pairwise(firsts))
        rows = tuple(row[a:b] for a, b in pairwise(starts))
        whole = tuple(levels)
        return cls(
            lambda: schedule,
            schedule.placement,
            whole,
            rows,
            columns[3][by_depth],
            schedule.trains,
            schedule.asynchronous,
        )

    @classmethod
    def in_turn(cls, ahead: Sequence[int], micro_batches: int, make: Callable[[], Schedule]) -> Graph:
        """The graph of an order with one stage on a rank that runs F and B in turn; see core.schedule.Kind.

        A level at a time, all ranks together: much faster than action by action where there are many ranks.
        """
        levels, rows, costs = _turns(tuple(ahead), micro_batches)
        return cls(make, tuple(range(len(ahead))), levels, rows, costs)

    def ends(self, costs: Costs) -> Floats:
        """When each action ends, shape (1 + actions, n)."""
        ends = np.zeros((len(self.costs), costs.actions_s.shape[1]))
        self._settle(costs, ends)
        return ends

    def _settle(self, costs: Costs, ends: Floats, factors: Floats | None = None) -> None:
        """Walk; where receives can be late, find who waits for a busy sender, and walk again."""
        if self.asynchronous:
            costs = costs._replace(actions_s=np.vstack([costs.actions_s, costs.optimizer_s]))
        self._walk(costs, ends, None, factors)
        if costs.late_s.any():
            self._walk(costs, ends, self._waits(costs, ends), factors)

    def _waits(self, costs: Costs, ends: Floats) -> Floats:
        """What each action waits at least from when it asks for its value, because its sender is computing then.

        Uneven actions are taken for even ones when it is asked what the sender does: few waits hang on that.
        """
        waits, every = np.zeros_like(ends), np.arange(ends.shape[1])
        for sender, asks in groupby(self.asks, key=lambda ask: ask.sender):
            rows = self.rows[sender]
            theirs = ends[rows]
            begins = theirs - costs.actions_s[self.costs[rows]]
            for row, before, transfer, _ in asks:
                asked, way = ends[before], costs.transfers_s[transfer]
                running = np.minimum(np.count_nonzero(theirs <= asked, axis=0), len(theirs) - 1)
                busy = (asked < theirs[running, every]) & (begins[running, every] <= (asked + way) * (1 + 1e-9))
                waits[row] = costs.late_s[transfer] * busy
        return waits

    def _walk(self, costs: Costs, ends: Floats, waits: Floats | None = None, factors: Floats | None = None) -> None:
        if costs.wires is not None:
            self._queue(costs, costs.wires, ends, waits, factors)
            return
        widest = max(len(level.cost) for level in self.levels)
        arrives, other = np.empty((2, widest, ends.shape[1]))
        for rows, before, source, transfer, cost in self.levels:
            arrival, scratch, out = arrives[: len(cost)], other[: len(cost)], ends[rows]
            ends.take(source, axis=0, out=arrival, mode="clip")
            costs.transfers_s.take(transfer, axis=0, out=scratch, mode="clip")
            arrival += scratch
            ends.take(before, axis=0, out=scratch, mode="clip")
            if waits is not None:
                scratch += waits[rows]
            np.maximum(arrival, scratch, out=arrival)
            costs.actions_s.take(cost, axis=0, out=scratch, mode="clip")
            if factors is not None:
                scratch *= factors[rows]
            np.add(arrival, scratch, out=out)

    def _queue(
        self, costs: Costs, wires: Wires, ends: Floats, waits: Floats | None, factors: Floats | None = None
    ) -> None:
        """Run the actions in the order of time, one candidate after the other."""
        columns = zip(*(level[1:4] for level in self.levels), strict=True)
        before, source, transfer = ([0, *np.concatenate(column).tolist()] for column in columns)
        flow = Flow(before, source, transfer)
        late = np.zeros_like(ends) if waits is None else waits
        for n in range(ends.shape[1]):
            actions_s = costs.actions_s[self.costs, n] * (1.0 if factors is None else factors[:, n])
            transfers_s = costs.transfers_s[:, n].tolist()
            ends[:, n] = queued_ends(flow, actions_s.tolist(), transfers_s, wires, late[:, n].tolist())

    def steps(self, costs: Costs) -> Floats:
        """The seconds of a step, or the period, for each of the n candidates, optimizer included."""
        columns = costs.actions_s.shape[1]
        width = min(columns, _CHUNK, max(1, _MOST // len(self.costs)))
        if len(self.rows) == 1 and not self.asynchronous:
            return self._alone(costs)
        result = np.empty(columns)
        ends = np.zeros((len(self.costs), width))
        for start in range(0, columns, width):
            part = slice(min(start, columns - width), min(start, columns - width) + width)
            chunk = costs.columns(part)
            self._settle(chunk, ends)
            result[part] = self._steps(ends, chunk.optimizer_s)
        return result

    def _alone(self, costs: Costs) -> Floats:
        """The steps of a single rank, which waits for nothing: in the order of its row, as the walk adds them."""
        work = np.add.accumulate(costs.actions_s[self.costs[self.rows[0]]], axis=0)[-1]
        for optimizer_s in costs.optimizer_s if self.trains else ():
            work = work + optimizer_s
        return np.asarray(work)

    def uneven_steps(self, costs: Costs, factors: Floats) -> Floats:
        """The seconds of n steps of one candidate; actions take ``factors``, shape (1 + actions, n), times as long."""
        actions, transfers, optimizer = (np.repeat(field, factors.shape[1], axis=1) for field in costs[:3])
        spread = Costs(actions, transfers, optimizer, costs.late_s, costs.wires)
        ends = np.zeros(factors.shape)
        self._settle(spread, ends, factors)
        return self._steps(ends, spread.optimizer_s)

    def _steps(self, ends: Floats, optimizer_s: Floats) -> Floats:
        if not self.asynchronous:
            return np.asarray(self._finish(ends, optimizer_s).max(axis=0))
        first, last, updates = self.window
        return np.asarray((ends[last[0]] - ends[first[0]]) / updates)

    @cached_property
    def window(self) -> tuple[Indices, Indices, int]:
        """The second half of the steady part: the rows of each rank's optimizer steps around it, and its updates.

        Up to p micro-batches go round together, so it is a multiple of p updates where there are as many.
        """
        first, last = steady(self.schedule)
        half = last - (first + last) // 2
        first = last - (half - half % self.schedule.ranks or half)
        steps = [
            [row for action, row in zip(actions, rows, strict=True) if action.op is Op.O]
            for actions, rows in zip(self.schedule.order, self.rows, strict=True)
        ]
        return np.array([row[first] for row in steps]), np.array([row[last] for row in steps]), last - first

    def _finish(self, ends: Floats, optimizer_s: Floats) -> Floats:
        """When each rank has done its optimizer step, shape (ranks, n)."""
        finish: Floats = ends[[rows[-1] for rows in self.rows]]
        for stage, rank in enumerate(self.placement if self.trains else ()):
            finish[rank] += optimizer_s[stage]
        return finish


@lru_cache(maxsize=8)
def _turns(ahead: tuple[int, ...], micro_batches: int) -> tuple[tuple[_Level, ...], tuple[Indices, ...], Indices]:
    """The levels, rows and costs of Graph.in_turn; settings that differ in memory or links ask for the same again."""
    stages, count = len(ahead), len(ahead) * micro_batches
    at = _levels(ahead, micro_batches)
    stage = np.tile(np.repeat(np.arange(stages), micro_batches), 2)
    order = np.lexsort((stage, at))
    row = np.empty(2 * count, np.intp)
    row[order] = np.arange(1, 2 * count + 1)
    forward, backward = row.reshape(2, stages, micro_batches)
    rows = np.sort(np.hstack([forward, backward]), axis=1)
    nothing = np.zeros((1, micro_batches), np.intp)  # comes before the first F and behind the last B
    source = np.concatenate([nothing, forward[:-1], backward[1:], nothing]).ravel()
    before = np.zeros(2 * count + 1, np.intp)
    before[rows[:, 1:]] = rows[:, :-1]
    op = np.repeat([0, 1], count)
    cost, transfer = len(OPS) * stage + op, stage + stages * op
    columns = [before[1:], *(values[order] for values in (source, transfer, cost))]
    firsts = np.flatnonzero(np.diff(at[order], prepend=-1, append=at.max() + 1)).tolist()
    levels = tuple(_Level(slice(a + 1, b + 1), *(column[a:b] for column in columns)) for a, b in pairwise(firsts))
    return levels, tuple(rows), np.concatenate([[0], columns[3]])


def _levels(ahead: tuple[int, ...], micro_batches: int) -> Indices:
    """The level of each F, by stage and micro-batch, then of each B, in one row: how many must come before it."""
    stage, batch, last = np.arange(len(ahead))[:, None], np.arange(micro_batches), len(ahead) - 1
    most = np.minimum(last + 1 - stage, micro_batches)
    if set(ahead) == {micro_batches}:
        forwards, backwards = stage + batch, 2 * last - stage + micro_batches + batch
    elif ahead == tuple(most[:, 0].tolist()):
        forwards = np.where(batch < most, stage + batch, stage + 2 * batch)
        backwards = 2 * last + 1 - stage + 2 * batch
    else:
        return _walked_levels(ahead, micro_batches)
    return np.concatenate([forwards, backwards]).ravel()


def _walked_levels(ahead: tuple[int, ...], micro_batches: int) -> Indices:
    """The same for any numbers of forwards that come first, level by level."""
    forwards, backwards = np.zeros((2, len(ahead)), np.intp)
    levels, level = np.zeros((2, len(ahead), micro_batches), np.intp), 0
    while (backwards < micro_batches).any():
        is_f = (forwards < micro_batches) & (forwards - backwards < np.array(ahead))
        before = np.concatenate([[micro_batches], forwards[:-1]])
        behind = np.concatenate([backwards[1:], [micro_batches]])
        now = np.flatnonzero(np.where(is_f, forwards < before, backwards < behind))
        levels[1 - is_f[now], now, np.where(is_f, forwards, backwards)[now]] = level
        forwards[now] += is_f[now]
        backwards[now] += ~is_f[now]
        level += 1
    return levels.ravel()


def _sender(action: Action, schedule: Schedule) -> int:
    """The rank that makes what an action needs."""
    return schedule.placement[action.stage - 1 if action.op is Op.F else action.stage + 1]


def _cost_row(action: Action, stages: int) -> int:
    """The row of an action among the costs; optimizer steps come behind the others."""
    if action.op is Op.O:
        return len(OPS) * stages + action.stage
    return len(OPS) * action.stage + OPS.index(action.op)


def costs_of(stages: Sequence[StageCost], hops: Sequence[Link | None], overhead_s: float = 0.0) -> Costs:
    """The seconds of one candidate; ``hops[s]`` is the link from stage s to s + 1, None inside a rank."""
    actions = [seconds + overhead_s for stage in stages for seconds in stage.times]
    activations = [hop.transfer_s(stage.send_bytes) if hop else 0.0 for hop, stage in zip(hops, stages, strict=False)]
    gradients = [
        hop.transfer_s(stage.receive_grad_bytes) if hop else 0.0 for hop, stage in zip(hops, stages, strict=False)
    ]
    optimizer = [stage.reduce_s + stage.optimizer_s for stage in stages]
    transfers = _column([0.0, *activations, *gradients, 0.0])
    return Costs(_column(actions), transfers, _column(optimizer), late_of(hops), wires_of(hops))


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)[:, None]


def late_of(hops: Sequence[Link | None]) -> Floats:
    """``Costs.late_s`` for the link behind each stage but the last."""
    behind = [hop.late_s if hop else 0.0 for hop in hops]
    return np.array([0.0, *behind, *behind, 0.0])
