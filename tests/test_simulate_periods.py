"""The period of asynchronous tables: closed forms, and what a long run shows."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.cluster import Link
from autopipe.core.periodic import for_updates
from autopipe.core.schedule import Op, kind
from autopipe.graph import Graph, costs_of
from autopipe.simulate import simulate
from tests.synthetic import stage

NAMES = ("PipeDream", "PipeDream-2BW", "PipeMare")


@pytest.mark.parametrize("name", NAMES)
def test_the_period_is_the_work_of_the_slowest_rank_with_its_optimizer(name: str) -> None:
    table = kind(name).schedule(3, 4)
    stages = [stage(1.0, 2.0), stage(2.0, 3.0, optimizer_s=0.5), stage(1.0, 1.0)]
    line = simulate(table, stages, [None, None], overhead_s=0.1)
    assert line.step_s == pytest.approx(4 * (2.0 + 3.0 + 0.2) + 0.5)
    assert line.rank_idle(1) == pytest.approx(0.0)
    assert line.work_s(0) == pytest.approx(4 * 3.2)


def test_a_transfer_lengthens_the_period_where_one_micro_batch_waits_for_it() -> None:
    """With p − i in flight, two ranks take c more a micro-batch: F, c, F and B, c, B before the next but one F."""
    line = simulate(kind("PipeDream").schedule(2, 1), [stage(1.0, 2.0, send=1)] * 2, [Link(0.0, 2.0)])
    assert line.step_s == pytest.approx((1 + 0.5 + 3 + 0.5 + 2) / 2)


@example("PipeDream", [(1.0, 1.0), (1.0, 2.0), (1.0, 1.0), (1.0, 2.0), (1.0, 1.0)], 0.3, 1)
@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_the_period_is_that_of_a_long_run(name: str, times: list[tuple[float, float]], hop_s: float, more: int) -> None:
    ranks = len(times)
    table = kind(name).schedule(ranks, ranks + more if name == "PipeDream-2BW" else 1 + more)
    stages = [stage(f, b, send=1) for f, b in times]
    hops = [Link(0.0, 1 / hop_s) if hop_s else None] * (ranks - 1)
    long = for_updates(table, table.updates + 200 // table.per_update)
    period_s = simulate(table, stages, hops).step_s
    assert period_s == pytest.approx(simulate(long, stages, hops).step_s, rel=0.03)
    assert Graph.of(table).steps(costs_of(stages, hops))[0] == pytest.approx(period_s)


def test_memory_counts_the_versions_and_what_is_in_flight() -> None:
    cost = stage(1.0, 1.0, static_bytes=100, held=10, send=1, receive=1)
    line = simulate(kind("PipeDream").schedule(3, 1), [cost] * 3, [None, None])
    for rank, peak in enumerate(line.peak_bytes):
        versions, in_flight = 3 - rank, 3 - rank
        before = in_flight + 4 if rank else 0  # two activations asked for ahead, two gradients on their way back
        behind = in_flight + 3 if rank < 2 else 0  # a gradient in use, two asked for ahead
        assert peak == 100 * versions + before + behind + 10 * in_flight
    assert {span.action.op for span in line.spans} == {Op.F, Op.B, Op.O}
    assert min(span.start_s for span in line.spans) == 0.0
