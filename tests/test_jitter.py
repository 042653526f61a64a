"""What uneven actions add to a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.cluster import Link
from autopipe.core.errors import UsageError
from autopipe.core.profile import Jitter
from autopipe.core.schedule import kind
from autopipe.core.stage import StageCost
from autopipe.graph import Graph, costs_of
from autopipe.jitter import jitter_s
from autopipe.simulate import simulate
from tests.synthetic import stage

SHARED = Link(0.1, 10.0, wires=("there", "back"))
"""A second for ten bytes, over a wire that all hops share."""


def added_s(
    jitter: Jitter, stages: list[StageCost], micro_batches: int, name: str = "GPipe", replicas: int = 1
) -> float:
    """What jitter adds to a step of a schedule with free transfers."""
    table = kind(name).schedule(len(stages), micro_batches)
    hops = [Link(0.0, 1e12)] * (len(stages) - 1)
    return jitter_s(jitter, Graph.of(table), costs_of(stages, hops), simulate(table, stages, hops), replicas)


def test_every_action_slower_by_a_fifth_while_others_work_half_the_time() -> None:
    """F F B B in turn take 6 s, each rank works half of it: all actions take 1 + 0.5 · 0.2 of their time."""
    assert added_s(Jitter(1.0, (1.2,)), [stage(1.0, 2.0)] * 2, 1) == pytest.approx(6 * 0.1)


def test_nothing_is_added_where_nothing_is_uneven() -> None:
    assert added_s(Jitter(1.0, (1.0, 1.0)), [stage(1.0, 2.0)] * 3, 4) == pytest.approx(0.0, abs=1e-12)


def test_nothing_is_added_on_a_single_rank() -> None:
    assert added_s(Jitter(1.0, (0.5, 2.0)), [stage(1.0, 2.0)], 4) == 0.0


def test_replicas_disturb_and_wait_for_each_other() -> None:
    """Two devices, both always busy: 3 s of actions take 1.2 times as long; with deviations that cancel out, the later
    of more replicas is later."""
    assert added_s(Jitter(1.0, (1.2,)), [stage(1.0, 2.0)], 1, replicas=2) == pytest.approx(3 * 0.2)
    uneven = Jitter(1.0, (0.7, 0.9, 1.1, 1.3))
    several = [added_s(uneven, [stage(1.0, 2.0)], 8, replicas=replicas) for replicas in (2, 4, 16)]
    assert 0 < several[0] < several[1] < several[2] <= 8 * 3 * 0.3


def test_even_stages_wait_for_each_other_more_than_uneven_ones() -> None:
    """With deviations that cancel out, only waiting adds."""
    jitter = Jitter(1.0, (0.7, 0.9, 1.1, 1.3))
    assert added_s(jitter, [stage(1.0, 2.0)] * 2, 16) > 2 * added_s(jitter, [stage(1.9, 3.8), stage(0.1, 0.2)], 16)


def test_long_actions_are_many_pieces_and_more_even() -> None:
    parts = (0.7, 0.9, 1.1, 1.3)
    stages = [stage(1.0, 2.0)] * 2
    assert added_s(Jitter(0.01, parts), stages, 8) < 0.5 * added_s(Jitter(1.0, parts), stages, 8)


def test_equal_questions_have_equal_answers() -> None:
    jitter, stages = Jitter(0.5, (0.8, 1.0, 1.5)), [stage(1.0, 2.0), stage(1.2, 2.1)]
    assert added_s(jitter, stages, 8, "1F1B") == added_s(jitter, stages, 8, "1F1B") > 0


@given(
    st.lists(st.tuples(*[st.floats(0.1, 4.0)] * 4), min_size=2, max_size=5),
    st.sampled_from([Link(0.25, 40.0), Link(0.25, 40.0, late_s=0.5), SHARED]),
)
def test_uneven_steps_of_one_micro_batch_are_those_of_other_stages(
    rows: list[tuple[float, float, float, float]], link: Link
) -> None:
    """With one micro-batch each action is the only one of its stage: its factor may as well be its stage's cost."""
    table = kind("GPipe").schedule(len(rows), 1)
    graph, hops = Graph.of(table), [link] * (len(rows) - 1)
    even = [stage(forward, backward, send=10, receive=10) for forward, backward, _, _ in rows]
    uneven = [stage(f * x, b * y, send=10, receive=10) for f, b, x, y in rows]
    factors = np.ones((len(graph.costs), 1))
    for rank, (_, _, forward, backward) in enumerate(rows):
        factors[graph.rows[rank], 0] = forward, backward
    expected = graph.steps(costs_of(uneven, hops))
    assert graph.uneven_steps(costs_of(even, hops), factors) == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [(0.0, (1.0,)), (1.0, ()), (1.0, (1.0, -0.1)), (float("nan"), (1.0,))])
def test_jitter_that_cannot_be_is_refused(wrong: tuple[float, tuple[float, ...]]) -> None:
    with pytest.raises(UsageError, match="jitter"):
        Jitter(*wrong)
