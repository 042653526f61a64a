from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.errors import UsageError
from autopipe.solvers import graph_dp
from autopipe.solvers.graph_dp import Answer, Costs, Option, smallest_longest
from autopipe.solvers.ideals import Dag, Family, Floats, Indices, prefixes
from autopipe.solvers.traffic import Traffic, Value


@dataclass(frozen=True, eq=False)
class Problem:
    """A DAG with work, sizes and values; options on classes of devices with a memory limit of their own."""

    dag: Dag
    options: tuple[Option, ...]
    available: tuple[int, ...]
    values: tuple[Value, ...]
    sizes: Floats
    limits: tuple[float, ...]

    def costs(self, family: Family) -> Costs:
        traffic, size = Traffic(family, self.values), family.members @ self.sizes

        def costs(number: int, inner: Indices, outer: Indices) -> Floats:
            option = self.options[number]
            work = family.members @ option.weights
            load = work[None, outer] - work[inner, None] + traffic.prices(inner, outer) / option.count
            return np.where(size[None, outer] - size[inner, None] > self.limits[option.device], np.inf, load)

        return costs

    def stage(self, number: int, nodes: set[int]) -> float:
        """What a stage costs, said in another way."""
        option = self.options[number]
        if sum(self.sizes[v] for v in nodes) > self.limits[option.device]:
            return np.inf
        load = sum(float(option.weights[v]) for v in nodes)
        for value in self.values:
            if value.maker in nodes and not set(value.readers) <= nodes:
                load += value.sent / option.count
            if value.maker not in nodes and set(value.readers) & nodes:
                load += value.received / option.count
        return load

    def solve(self, seconds: float = np.inf) -> Answer | None:
        return smallest_longest(self.dag, self.options, self.available, self.costs, seconds=seconds)


def numbers(rng: np.random.Generator, count: int, most: int) -> Floats:
    return rng.integers(0, most, count).astype(float)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    nodes = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = rng.permutation(nodes)
    density = draw(st.sampled_from([0.1, 0.3, 0.7]))
    edges = tuple((int(a), int(b)) for i, a in enumerate(order) for b in order[i + 1 :] if rng.random() < density)
    dag, most = Dag(nodes, edges), draw(st.sampled_from([3, 1000]))
    classes = draw(st.integers(1, 2))
    options = tuple(
        Option(int(rng.integers(classes)), numbers(rng, nodes, most), int(rng.integers(1, 3)))
        for _ in range(draw(st.integers(1, 3)))
    )
    back = draw(st.booleans())
    values = []
    for maker in range(nodes):
        readers = dag.feeds[maker]
        if readers:
            values.append(Value(maker, readers, *map(float, rng.integers(0, most, 2))))
            if back:
                values.append(Value(readers[0], (maker,), *map(float, rng.integers(0, most, 2))))
    limits = tuple(draw(st.sampled_from([1e9, 4.0])) for _ in range(classes))
    available = tuple(draw(st.integers(0, 3)) for _ in range(classes))
    return Problem(dag, options, available, tuple(values), numbers(rng, nodes, 4), limits)


def nodes_of(mask: int) -> set[int]:
    return {v for v in range(mask.bit_length()) if mask >> v & 1}


def brute(problem: Problem) -> float | None:
    """The least longest stage of everything that there is: one stage after the other, by every option and ideal."""
    ideals = [
        mask for mask in range(2**problem.dag.nodes) if all(not problem.dag.needs[v] & ~mask for v in nodes_of(mask))
    ]

    @cache
    def cost(option: int, mask: int) -> float:
        return problem.stage(option, nodes_of(mask))

    @cache
    def rest(held: int, left: tuple[int, ...]) -> float:
        if held == 2**problem.dag.nodes - 1:
            return 0.0
        found = [np.inf]
        for number, option in enumerate(problem.options):
            if option.count <= left[option.device]:
                fewer = tuple(n - option.count * (c == option.device) for c, n in enumerate(left))
                for each in ideals:
                    if each != held and not held & ~each:
                        found.append(max(cost(number, each & ~held), rest(each, fewer)))
        return min(found)

    best = rest(0, problem.available)
    return best if best < np.inf else None


def compare(problem: Problem) -> None:
    found, expected = problem.solve(), brute(problem)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.value == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert found.proved
        stages = zip(found.options, pairwise(found.sets), strict=True)
        costs = [problem.stage(option, nodes_of(b & ~a)) for option, (a, b) in stages]
        assert max(costs) == pytest.approx(found.value, rel=1e-9, abs=1e-9)
        for a, b in pairwise(found.sets):
            assert a & ~b == 0
            assert all(problem.dag.needs[v] & ~b == 0 for v in nodes_of(b))


@given(problems())
@settings(max_examples=600, deadline=None)
def test_smallest_longest_is_brute_force(problem: Problem) -> None:
    compare(problem)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_after_linear_orders_too(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_dp, "_FEW", 0)
        compare(problem)


@pytest.mark.slow
@given(problems())
@settings(max_examples=3_000, deadline=None)
def test_smallest_longest_is_brute_force_many_times(problem: Problem) -> None:
    compare(problem)


@given(problems(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_renaming_nodes_and_scaling_change_names_and_scale_only(problem: Problem, chance: object) -> None:
    first = problem.solve()
    assert first == problem.solve()
    scaled = replace(
        problem,
        options=tuple(replace(each, weights=each.weights * 4) for each in problem.options),
        values=tuple(each._replace(sent=each.sent * 4, received=each.received * 4) for each in problem.values),
    ).solve()
    assert (scaled and (scaled.sets, scaled.options)) == (first and (first.sets, first.options))
    assert (scaled and scaled.value) == (first and first.value * 4)
    back = problem.dag.nodes - 1
    names = np.arange(problem.dag.nodes)[::-1]
    renamed = Problem(
        Dag(problem.dag.nodes, tuple((back - a, back - b) for a, b in problem.dag.edges)),
        tuple(replace(each, weights=each.weights[names]) for each in problem.options),
        problem.available,
        tuple(Value(back - v.maker, tuple(back - r for r in v.readers), *v[2:]) for v in problem.values),
        problem.sizes[names],
        problem.limits,
    ).solve()
    assert (renamed and renamed.value) == (first and pytest.approx(first.value))


def diamond(branch: tuple[float, float]) -> Problem:
    """0 → 1, 2 → 3 with the branches' work given, 1 for the ends, and a value of price 1 on every edge."""
    dag = Dag(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    values = tuple(Value(v, dag.feeds[v], 1.0, 1.0) for v in range(3))
    return Problem(dag, (Option(0, np.array([1.0, *branch, 1.0])),), (2,), values, np.zeros(4), (1e9,))


def test_a_value_with_two_readers_crosses_once() -> None:
    """{0} | {1, 2, 3} sends one value to two readers: 1 + 1 | 5 + 1. {0, 1} | {2, 3}: 3 + 2 | 3 + 2."""
    found = diamond((2.0, 2.0)).solve()
    assert found == Answer((0, 0b0011, 0b1111), (0, 0), 5.0, 5.0) or found == Answer(
        (0, 0b101, 0b1111), (0, 0), 5.0, 5.0
    )
    heavy = diamond((6.0, 6.0)).solve()
    assert heavy is not None
    assert heavy.value == 9.0


def test_a_budget_that_ends_leaves_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_dp, "_FEW", 0)
    found = diamond((2.0, 2.0)).solve(seconds=-1.0)
    assert found is not None
    assert not found.proved
    assert found.lower_bound == pytest.approx(3.0)
    assert found.value == 5.0
    monkeypatch.setattr(graph_dp, "_LADDER", (0.5,))
    half = diamond((2.0, 2.0)).solve()
    assert half is not None
    assert (half.value, half.lower_bound) == (5.0, pytest.approx(4.0))


def test_too_many_ideals_leave_the_linear_orders() -> None:
    wide = Dag(12, ())
    weights = np.arange(1.0, 13.0)
    found = smallest_longest(
        wide,
        [Option(0, weights)],
        [3],
        lambda family: lambda number, inner, outer: family.weights[None, outer] - family.weights[inner, None],
        most=100,
    )
    assert found is not None
    assert found.lower_bound == pytest.approx(26.0)
    assert found.value >= 26.0


def test_ideals_of_a_small_graph() -> None:
    dag = Dag(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    assert sorted(dag.ideals(100) or []) == [0b0000, 0b0001, 0b0011, 0b0101, 0b0111, 0b1111]
    assert dag.ideals(5) is None
    assert prefixes([0, 2, 1, 3]) == [0, 0b0001, 0b0101, 0b0111, 0b1111]
    with pytest.raises(UsageError, match="cycle"):
        Dag(2, ((0, 1), (1, 0)))


@given(problems())
@settings(max_examples=100, deadline=None)
def test_families_are_in_an_order_that_respects_inclusion(problem: Problem) -> None:
    family = Family(problem.dag.ideals(1000) or [], problem.dag.nodes, problem.options[0].weights)
    everything = np.arange(len(family))
    contained = family.contained(everything, everything)
    for i, j in product(everything, everything):
        assert contained[i, j] == (family.sets[i] & ~family.sets[j] == 0)
        assert not contained[i, j] or i <= j
    assert sorted(family.sets) == sorted(problem.dag.ideals(1000) or [])
