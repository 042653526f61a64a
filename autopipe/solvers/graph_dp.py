"""The best way to cut a DAG into stages, exactly: the smallest longest stage over all chains of ideals.

First the linear orders, unless there are few ideals: what is best along some of them bounds the rest from above. Then
a dynamic program over (devices used, ideal), ideals in the order of their weight. A stage whose weight alone reaches
the threshold is part of nothing better, nor is an ideal that the devices used cannot have got to, or from which those
left cannot finish: such pairs are never looked at. The threshold is raised in steps from the lower bound to the upper
one, so that a budget that ends leaves a bound that is proved.

Ties: a linear order's stages stand unless something is better by more than rounding; within a family of ideals the
fewest devices, then, from the last stage backwards, the earliest option and the lightest ideal before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from autopipe.solvers.ideals import Dag, Family, Floats, Indices, prefixes

_ORDERS = 12
_LARGEST = float(np.finfo(np.float64).max)
_FEW = 500
"""So few ideals are searched at once, without the linear orders."""
_SAME = 1e-12
"""Relative to a value: less is rounding."""
_CELLS = 4_000_000
"""So many stages are looked at together; a matter of memory."""
_LADDER = (0.5, 1.0)
"""Thresholds, as parts of the way from the lower to the upper bound."""


@dataclass(frozen=True, eq=False)
class Option:
    """One way to run a stage: on ``count`` devices of class ``device``.

    ``weights`` has a number for each node: a stage costs at least their sum.
    """

    device: int
    weights: Floats
    count: int = 1


Costs = Callable[[int, Indices, Indices], Floats]
"""What stages cost: from an option's number and the numbers of inner and outer ideals, both ascending, to a table of
shape (inner, outer), infinite where a stage may not be. Where the inner ideal is not contained anything will do."""


class Answer(NamedTuple):
    """Ideals from the empty set to all nodes, each stage's option, the longest stage, and what none can beat."""

    sets: tuple[int, ...]
    options: tuple[int, ...]
    value: float
    lower_bound: float

    @property
    def proved(self) -> bool:
        """Whether nothing can be better."""
        return self.lower_bound >= self.value * (1 - _SAME)


def smallest_longest(
    dag: Dag,
    options: Sequence[Option],
    available: Sequence[int],
    costs: Callable[[Family], Costs],
    *,
    sets: Sequence[int] | None = None,
    seconds: float = np.inf,
    most: int = 300_000,
) -> Answer | None:
    """The stages on at most the ``available`` devices of each class whose longest one is shortest; None without any.

    ``sets`` are the ideals that may be used, all where it is not given. When the budget of CPU ``seconds`` ends, or
    there are more than ``most`` ideals, the best of the linear orders is returned with what was proved until then;
    where these give nothing, or ideals are few, the budget does not count.
    """
    ends = time.process_time() + seconds
    ideals = dag.ideals(most) if sets is None else list(sets)
    best, bound = None, _bound(options, available)
    if ideals is None or len(ideals) > _FEW:
        best = _along_orders(dag, options, available, costs, sets)
    if best is None:
        ends = np.inf
    if ideals is not None and (best is None or best.value > bound):
        program = _Program(_family(dag, ideals, options), options, available, costs, ends)
        for limit in _limits(bound, best):
            try:
                found = program.best(limit)
            except _OutOfTime:
                break
            if found is not None or best is None:
                return found
            bound = limit
    return best._replace(lower_bound=min(bound / (1 - _SAME), best.value)) if best else None


def best_order(
    dag: Dag,
    options: Sequence[Option],
    available: Sequence[int],
    costs: Callable[[Family], Costs],
    *,
    sets: Sequence[int] | None = None,
) -> Answer | None:
    """The best that some linear orders give, with a bound that holds for all splits; None where they give nothing."""
    best: Answer | None = None
    for chain in _chains(dag, sets):
        best = _below(best, dag, chain, options, available, costs)
    return best._replace(lower_bound=min(_bound(options, available), best.value)) if best else None


def _chains(dag: Dag, sets: Sequence[int] | None) -> Iterator[list[int]]:
    """The ideals along some linear orders, those among the sets where these are given."""
    allowed = None if sets is None else set(sets)
    for order in dag.orders(_ORDERS):
        yield [each for each in prefixes(order) if allowed is None or each in allowed]


def _family(dag: Dag, ideals: Iterable[int], options: Sequence[Option]) -> Family:
    return Family({0, *ideals, 2**dag.nodes - 1}, dag.nodes, options[0].weights)


def _below(
    best: Answer | None,
    dag: Dag,
    ideals: Iterable[int],
    options: Sequence[Option],
    available: Sequence[int],
    costs: Callable[[Family], Costs],
) -> Answer | None:
    """The best along chains of some ideals where it is better, else what there was."""
    program = _Program(_family(dag, ideals, options), options, available, costs, np.inf)
    return program.best(best.value * (1 - _SAME) if best else _LARGEST) or best


def _limits(bound: float, best: Answer | None) -> Iterator[float]:
    """The thresholds to try, ascending."""
    if best is None:
        yield _LARGEST
        return
    for part in _LADDER:
        yield bound + part * (best.value - bound) if part < 1 else best.value * (1 - _SAME)


def _bound(options: Sequence[Option], available: Sequence[int]) -> float:
    """All work shared out evenly, or the largest node."""
    capacity = sum(
        count * cap for count, cap in zip(available, _capacities(options, len(available)), strict=True) if count
    )
    largest = np.min([option.weights for option in options], axis=0).max(initial=0.0)
    return max(float(options[0].weights.sum()) / capacity if capacity else np.inf, float(largest))


def _along_orders(
    dag: Dag,
    options: Sequence[Option],
    available: Sequence[int],
    costs: Callable[[Family], Costs],
    sets: Sequence[int] | None,
) -> Answer | None:
    """The best along some linear orders, then along all chains that these have together."""
    best, seen = None, set[int]()
    for chain in _chains(dag, sets):
        best = _below(best, dag, chain, options, available, costs)
        seen.update(chain)
    return _below(best, dag, seen, options, available, costs)


def _rates(options: Sequence[Option]) -> list[float]:
    """For each option the least cost per weight of the first one; 0 where nothing weighs."""
    heavy = options[0].weights > 0
    if not heavy.any():
        return [0.0] * len(options)
    return [float((each.weights[heavy] / options[0].weights[heavy]).min()) for each in options]


def _capacities(options: Sequence[Option], classes: int) -> list[float]:
    """The most weight that a device of each class takes for a cost of 1."""
    result = [0.0] * classes
    for option, rate in zip(options, _rates(options), strict=True):
        result[option.device] = max(result[option.device], 1 / (rate * option.count) if rate else np.inf)
    return result


class _OutOfTime(Exception):
    """The budget has ended."""


_State = tuple[int, ...]
"""Devices used of each class."""


class _Table(NamedTuple):
    """What an option costs from ideals ``rows`` to those of a block from its ``first`` one on."""

    rows: Indices
    costs: Floats
    first: int


class _Program:
    """The dynamic program over a family of ideals."""

    def __init__(
        self,
        family: Family,
        options: Sequence[Option],
        available: Sequence[int],
        costs: Callable[[Family], Costs],
        ends: float,
    ) -> None:
        self.family, self.options, self.costs, self.ends = family, options, costs(family), ends
        self.available, self.rates = available, _rates(options)
        self.capacities = _capacities(options, len(available))
        self.states = sorted(product(*(range(most + 1) for most in available)), key=lambda state: (sum(state), state))
        self.slack = _SAME * 1000 * float(family.weights[-1])

    def best(self, limit: float) -> Answer | None:
        """The best stages with every one below the limit; None when there are none."""
        values = self._values(limit)
        ends = min((float(values[state][-1]), sum(state), state) for state in self.states)
        return self._traced(values, ends[2], ends[0]) if ends[0] < limit else None

    def _values(self, limit: float) -> dict[_State, Floats]:
        """For each state and ideal the least longest stage, where it is below the limit and may lead to the end."""
        values = {state: np.full(len(self.family), np.inf) for state in self.states}
        values[self.states[0]][0] = 0.0
        windows = {state: self._window(state, limit) for state in self.states}
        useful = np.zeros(len(self.family), dtype=bool)
        for first, last in windows.values():
            useful[first:last] = True
        alive = np.zeros(len(self.family), dtype=bool)
        alive[0], useful[0] = True, False
        waiting = np.flatnonzero(useful)
        while len(waiting):
            if time.process_time() > self.ends:
                raise _OutOfTime
            inner = self._within(limit, alive, int(waiting[0]))
            outer, waiting = np.split(waiting, [max(16, min(_CELLS // (len(inner) + 16), 2048))])
            self._extend(values, alive, np.concatenate([inner, outer]), outer, windows, limit)
        return values

    def _window(self, state: _State, limit: float) -> tuple[int, int]:
        """The ideals, from the first to before the last, that a state can have got to and finish from."""
        weights, total = self.family.weights, float(self.family.weights[-1])
        pairs = [*zip(state, self.available, self.capacities, strict=True)]
        used = sum(count * capacity for count, _, capacity in pairs if count)
        left = sum((most - count) * capacity for count, most, capacity in pairs if count < most)
        first = np.searchsorted(weights, total - left * limit - self.slack)
        return int(first), int(np.searchsorted(weights, used * limit + self.slack, side="right"))

    def _within(self, limit: float, alive: np.ndarray, first: int) -> Indices:
        """The live ideals before one that a single stage can lead from."""
        begin = self._begin(limit, min(self.rates), self.family.weights, first)
        return begin + np.flatnonzero(alive[begin:first])

    def _begin(self, limit: float, rate: float, weights: Floats, first: int) -> int:
        reach = limit / rate if rate else np.inf
        return int(np.searchsorted(weights, self.family.weights[first] - reach - self.slack))

    def _extend(
        self,
        values: dict[_State, Floats],
        alive: np.ndarray,
        inner: Indices,
        outer: Indices,
        windows: dict[_State, tuple[int, int]],
        limit: float,
    ) -> None:
        """Fill in the values of the outer ideals, from those of the inner ones, which end with the outer ones."""
        ranges = {state: np.searchsorted(outer, windows[state]) for state in self.states[1:]}
        useful = {state: (int(a), int(b)) for state, (a, b) in ranges.items() if a < b}
        tables = [self._table(number, values, inner, outer, useful, limit) for number in range(len(self.options))]
        for state, (first, last) in useful.items():
            best = self._least(values, state, tables, first, last, limit)
            values[state][outer[first:last]] = np.where(best < limit, best, np.inf)
            alive[outer[first:last]] |= best < limit

    def _table(
        self,
        number: int,
        values: dict[_State, Floats],
        inner: Indices,
        outer: Indices,
        useful: dict[_State, tuple[int, int]],
        limit: float,
    ) -> _Table:
        """What an option costs from the ideals that it can lead from, to those that it can lead to."""
        begin = self._begin(limit, self.rates[number], self.family.weights[inner], int(outer[0]))
        rows, live = inner[begin:], np.zeros(len(inner) - begin, dtype=bool)
        live[-len(outer) :] = True  # not known yet
        ends: list[int] = []
        for state, columns in useful.items():
            source = self._source(state, self.options[number])
            if source is not None:
                live |= values[source][rows] < limit
                ends += columns
        if not ends:
            return _Table(rows[:0], np.zeros((0, 0)), 0)
        rows, stops = rows[live], outer[min(ends) : max(ends)]
        costs = np.where(self.family.contained(rows, stops), self.costs(number, rows, stops), np.inf)
        costs[np.searchsorted(rows, stops), np.arange(len(stops))] = np.inf
        return _Table(rows, costs, min(ends))

    def _least(
        self, values: dict[_State, Floats], state: _State, tables: Sequence[_Table], first: int, last: int, limit: float
    ) -> Floats:
        best = np.full(last - first, np.inf)
        for option, table in zip(self.options, tables, strict=True):
            source = self._source(state, option)
            if source is not None:
                before = values[source][table.rows]
                live = np.flatnonzero(before < limit)
                costs = table.costs[live, first - table.first : last - table.first]
                reached = np.maximum(before[live, None], costs)
                np.minimum(best, reached.min(axis=0, initial=np.inf), out=best)
        return best

    def _source(self, state: _State, option: Option) -> _State | None:
        """The state before a stage of the option."""
        left = state[option.device] - option.count
        return (*state[: option.device], left, *state[option.device + 1 :]) if left >= 0 else None

    def _traced(self, values: dict[_State, Floats], state: _State, value: float) -> Answer:
        """The stages that lead to all nodes in a state."""
        within, index = value * (1 + _SAME), len(self.family) - 1
        sets, options, longest = [index], [], 0.0
        while index:
            option, index, cost = self._last_stage(values, state, index, within)
            state = self._source(state, self.options[option]) or self.states[0]
            sets.append(index)
            options.append(option)
            longest = max(longest, cost)
        return Answer(tuple(self.family.sets[i] for i in reversed(sets)), tuple(reversed(options)), longest, longest)

    def _last_stage(
        self, values: dict[_State, Floats], state: _State, index: int, within: float
    ) -> tuple[int, int, float]:
        """The option of the last stage before an ideal, the ideal before it, and its cost."""
        outer = np.array([index])
        for number, option in enumerate(self.options):
            source = self._source(state, option)
            rows = np.flatnonzero(values[source][:index] <= within) if source is not None else outer[:0]
            if len(rows):
                costs = np.where(self.family.contained(rows, outer), self.costs(number, rows, outer), np.inf)[:, 0]
                good = np.flatnonzero(costs <= within)
                if len(good):
                    return number, int(rows[good[0]]), float(costs[good[0]])
        raise AssertionError("a value without a stage that leads to it")
