"""Links that share a wire: cases drawn by hand, and agreement with the walk where nothing is shared."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.errors import UsageError
from autopipe.core.schedule import Action, Schedule
from autopipe.graph import Costs, Graph, costs_of
from autopipe.simulate import simulate
from autopipe.wires import wires_of
from tests.synthetic import random_schedule, stage


def table(placement: tuple[int, ...], *rows: str) -> Schedule:
    return Schedule("drawn", placement, tuple(tuple(map(Action.parse, row.split())) for row in rows))


def ends(line) -> dict[str, float]:
    return {str(span.action): span.end_s for span in line.spans if span.action.op.value != "O"}


def test_two_messages_over_one_wire() -> None:
    """The second one is made at 2 s, while the first has the wire from 1 to 3 s.

    rank 0  |0F0|0F1|
    wire        |  0F0  |  0F1  |
    rank 1                |1F0|   |1F1|      half a second after its message has left the wire
            0   1   2   3   4   5
    """
    forwards = table((0, 1), "0F0 0F1", "1F0 1F1")
    wire = Link(0.5, 5.0, wires=("a", "b"))  # 10 bytes take the wire for 2 s, and arrive 0.5 s later
    line = simulate(forwards, [stage(1, send=10), stage(1)], [wire])
    assert ends(line) == {"0F0": 1, "0F1": 2, "1F0": 4.5, "1F1": 6.5}
    alone = simulate(forwards, [stage(1, send=10), stage(1)], [replace(wire, wires=())])
    assert ends(alone) == {"0F0": 1, "0F1": 2, "1F0": 4.5, "1F1": 5.5}


def test_messages_go_in_the_order_in_which_they_are_made() -> None:
    """Ranks 0 and 1 sit on one node, whose only way out takes 3 s a message; rank 2 sends over its own, 1 s.

    rank 0  |0F0|0F1|
    rank 1                          |2F0|       |2F1|
    out         |    0F0    |    0F1    |    2F0    |    2F1    |
    rank 2                  |1F0|       |1F1|       |3F0|       |3F1|
            0   1   2   3   4   5   6   7   8   9  10  11  12  13  14
    """
    forwards = table((0, 2, 1, 2), "0F0 0F1", "2F0 2F1", "1F0 1F1 3F0 3F1")
    out, back = Link(0.0, 1.0, wires=("out", "in")), Link(0.0, 1.0, wires=("in", "out"))
    costs = [stage(1, send=3), stage(1, send=1), stage(1, send=3), stage(1)]
    found = ends(simulate(forwards, costs, [out, back, out]))
    assert (found["0F0"], found["1F0"], found["2F0"]) == (1, 5, 7)
    assert (found["1F1"], found["2F1"], found["3F0"], found["3F1"]) == (8, 10, 11, 14)


seeds = st.integers(0, 2**32 - 1)


def drawn(rng: random.Random) -> tuple[Schedule, list, list[Link | None]]:
    ranks = rng.randint(1, 4)
    made = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 5))
    costs = [stage(0.1 + rng.random(), 0.1 + rng.random(), send=rng.randint(0, 9)) for _ in made.placement]
    hops = [
        None if a == b else Link(rng.random(), 1 + rng.random(), rng.choice([0, rng.random()]))
        for a, b in itertools.pairwise(made.placement)
    ]
    return made, costs, hops


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_wires_that_take_no_time_change_nothing(seed: int) -> None:
    """With all bytes' time in the latency a shared wire is never busy: the two ways to simulate must agree."""
    made, costs, hops = drawn(random.Random(seed))
    plain = [hop and replace(hop, latency_s=hop.latency_s + 1, bytes_per_s=1e300) for hop in hops]
    shared = [hop and replace(hop, wires=("one", "one")) for hop in plain]
    expected, found = simulate(made, costs, plain), simulate(made, costs, shared)
    assert ends(found) == pytest.approx(ends(expected), rel=1e-12)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_sharing_never_overlaps_messages(seed: int) -> None:
    """Each message leaves when it is made or later, and no two have the wire at once."""
    made, costs, hops = drawn(random.Random(seed))
    shared = [hop and replace(hop, late_s=0.0, wires=("one", "one")) for hop in hops]
    line = simulate(made, costs, shared)
    starts = {str(span.action): span.start_s for span in line.spans}
    found = ends(line)
    total = sum(
        made.micro_batches * (costs[s].send_bytes + costs[s].receive_grad_bytes) / hop.bytes_per_s
        for s, hop in enumerate(shared)
        if hop
    )
    first = min(costs[s].forward_s for s in range(made.stages))
    if total:
        assert line.step_s >= total * (1 - 1e-12)
        assert line.step_s > first
    for s, hop in enumerate(shared):
        if hop and costs[s].send_bytes:
            for b in range(made.micro_batches):
                way = hop.latency_s + costs[s].send_bytes / hop.bytes_per_s
                assert starts[f"{s + 1}F{b}"] >= found[f"{s}F{b}"] + way * (1 - 1e-9)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_many_at_once_agree_with_one_at_a_time(seed: int) -> None:
    made, costs, hops = drawn(random.Random(seed))
    shared = [hop and replace(hop, wires=("one", "two")) for hop in hops]
    one = costs_of(costs, shared)
    twice = Costs(*(np.hstack([column, column]) for column in one[:3]), one.late_s, one.wires)
    step = simulate(made, costs, shared).step_s
    assert Graph.of(made).steps(twice) == pytest.approx([step, step], rel=1e-12)


def test_a_shared_tier_names_the_ways_out() -> None:
    nodes = Cluster(
        "nodes",
        (Device("device", 1, 8),),
        (Tier("bus", 4, Link(0.0, 9.0)), Tier("net", 8, Link(0.0, 1.0), shared=True)),
    )
    inside, across = nodes.link(0, 3), nodes.link(3, 4)
    assert inside is not None
    assert inside.wires == ()
    assert across is not None
    assert across.wires == ("net 0", "net 1")
    assert wires_of([inside]) is None
    found = wires_of([across, inside])
    assert found is not None
    assert found.numbers == (-1, 0, -1, 1, -1, -1)


def test_a_link_names_two_wires_or_none() -> None:
    with pytest.raises(UsageError, match="names two wires, there and back, or none, not 1"):
        Link(0.0, 1.0, wires=("one",))
