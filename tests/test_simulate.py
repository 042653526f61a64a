from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401
from autopipe.core.cluster import Link
from autopipe.core.errors import ScheduleError
from autopipe.core.in_flight import kept as kept_by
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import Action, Op, Schedule, kind
from autopipe.core.stage import StageCost
from autopipe.core.timeline import Memory
from autopipe.loads import loads, peak_loads
from autopipe.simulate import simulate
from tests.synthetic import random_pipeline, stage


def none(count: int) -> list[Link | None]:
    return [None] * (count - 1)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@given(ranks=st.integers(1, 6), more=st.integers(0, 6), forward=st.integers(1, 9), backward=st.integers(1, 9))
def test_idle_at_equal_stages(name: str, ranks: int, more: int, forward: int, backward: int) -> None:
    """Both idle for (p − 1)(F + B) where m ≥ p."""
    batches = ranks + more
    line = simulate(kind(name).schedule(ranks, batches), [stage(forward, backward)] * ranks, none(ranks))
    assert line.step_s == (batches + ranks - 1) * (forward + backward)
    assert line.idle == pytest.approx((ranks - 1) / (batches + ranks - 1))


@given(ranks=st.integers(1, 6), batches=st.integers(1, 9))
def test_peak_activations(ranks: int, batches: int) -> None:
    """1F1B holds min(m, p − i) micro-batches on rank i, GPipe all m."""
    stages = [stage(held=1)] * ranks
    one = simulate(kind("1F1B").schedule(ranks, batches), stages, none(ranks))
    assert one.peak_bytes == tuple(min(batches, ranks - i) for i in range(ranks))
    assert simulate(kind("GPipe").schedule(ranks, batches), stages, none(ranks)).peak_bytes == (batches,) * ranks


@pytest.mark.parametrize(
    ("name", "ranks", "batches", "makespan", "peak"),
    [("GPipe", 4, 8, 33, 8), ("GPipe", 8, 16, 69, 16), ("1F1B", 4, 8, 33, 4), ("1F1B", 8, 16, 69, 8)],
)
def test_unit_costs(name: str, ranks: int, batches: int, makespan: float, peak: int) -> None:
    line = simulate(kind(name).schedule(ranks, batches), [stage(1, 2, held=1)] * ranks, none(ranks))
    assert (line.step_s, max(line.peak_bytes)) == (makespan, peak)


def test_a_case_drawn_by_hand() -> None:
    """Two stages, two micro-batches, an activation takes 1 s over the link and its gradient 1 s back.

    rank 0   0F0 0F1 .   .   .   .   .   0B0 0B0 .   .   0B1 0B1 O
             0   1   2   3   4   5   6   7       9       11      13 14
    rank 1   .   .   1F0 1F0 1B0 1B0 1F1 1F1 1B1 1B1 O   O
             0       2       4       6       8       10      12
    """
    stages = [
        stage(1, 2, send=10, optimizer_s=1, static_bytes=100, gradient=6, first=9, held=5, workspace=2),
        stage(2, 2, receive=10, optimizer_s=2, static_bytes=50, held=3),
    ]
    line = simulate(kind("1F1B").schedule(2, 2), stages, [Link(0.5, 20.0)])
    spans = {str(s.action): (s.start_s, s.end_s) for s in line.spans}
    assert spans == {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (7, 9), "0B1": (11, 13), "0O0": (13, 14),
        "1F0": (2, 4), "1B0": (4, 6), "1F1": (6, 8), "1B1": (8, 10), "1O0": (10, 12),
    }  # fmt: skip
    assert line.step_s == 14
    assert line.work_s(0) == 7
    assert line.work_s(1) == 10
    assert line.idle == pytest.approx(1 - 17 / 28)
    # rank 0: 100 static, 2 × 10 for what it sends and 10 for a gradient that comes; F keeps 5; the first B turns its 5
    # into gradients of 6, with at most 9 on the way
    assert line.memory[0] == (
        Memory(0, 132), Memory(1, 137), Memory(2, 140), Memory(7, 144), Memory(9, 141),
        Memory(11, 143), Memory(13, 138), Memory(14, 130),
    )  # fmt: skip
    assert line.memory[1] == (
        Memory(0, 80), Memory(2, 80), Memory(4, 83), Memory(6, 80), Memory(8, 83), Memory(10, 80), Memory(12, 80),
    )  # fmt: skip
    assert line.peak_bytes == (144, 83)


def test_overhead_is_part_of_every_action_but_the_optimizer() -> None:
    line = simulate(kind("GPipe").schedule(1, 3), [stage(1, 2, optimizer_s=4)], [], overhead_s=0.5)
    assert line.step_s == 3 * (1.5 + 2.5) + 4


def test_split_backwards_free_in_two_steps() -> None:
    table = Schedule("split", (0,), (tuple(map(Action.parse, ("0F0", "0F1", "0I0", "0I1", "0W0", "0W1"))),))
    line = simulate(table, [stage(1, held=5, held_i=2, input_grad_s=3, weight_grad_s=4)], [])
    assert line.step_s == 2 * (1 + 3 + 4)
    assert [point.bytes for point in line.memory[0]] == [0, 5, 10, 7, 4, 2, 0, 0]


def test_a_deadlock_is_an_error() -> None:
    rows = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    table = Schedule("stuck", (0, 1), tuple(tuple(map(Action.parse, row)) for row in rows))
    with pytest.raises(ScheduleError, match="0B0 waits for 1B0"):
        simulate(table, [stage()] * 2, none(2))


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_any_table_against_an_event_simulator(seed: int) -> None:
    rng = random.Random(seed)
    table, stages, hops, overhead = random_pipeline(rng)
    line = simulate(table, stages, hops, overhead_s=overhead)
    step, peaks = _by_events(table, stages, hops, overhead)
    assert line.step_s == pytest.approx(step, rel=1e-12)
    assert line.peak_bytes == peaks
    for rank in range(table.ranks):
        spans = [span for span in line.spans if span.rank == rank]
        assert tuple(span.action for span in spans if span.action.op is not Op.O) == table.order[rank]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(spans))
        times = [point.time_s for point in line.memory[rank]]
        assert times == sorted(times)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_peak_loads_are_enough(seed: int) -> None:
    rng = random.Random(seed)
    table, stages, hops, _ = random_pipeline(rng)
    line = simulate(table, stages, hops)
    for rank in range(table.ranks):
        own = [stages[s] for s, where in enumerate(table.placement) if where == rank]
        crossings = [kept_by(table)[s] for s, where in enumerate(table.placement) if where == rank]
        pairs = zip(own, crossings, strict=True)
        base = sum(cost.lasting_bytes + cost.buffers_bytes(*crossing) for cost, crossing in pairs)
        assert base + max(load.bytes(own) for load in peak_loads(table, rank)) == line.peak_bytes[rank]
        *_, after = loads(table, rank)
        assert after.bytes(own) == 0


def _by_events(
    table: Schedule, stages: Sequence[StageCost], hops: Sequence[Link | None], overhead: float
) -> tuple[float, tuple[int, ...]]:
    """Another simulator, action by action, with memory as a running sum: nothing shared with the one under test."""
    ends, _, _ = _run(table, stages, hops, overhead, {})
    _, step, peaks = _run(table, stages, hops, overhead, _late(table, stages, hops, overhead, ends))
    return step, peaks


def _late(
    table: Schedule,
    stages: Sequence[StageCost],
    hops: Sequence[Link | None],
    overhead: float,
    ends: dict[Action, float],
) -> dict[Action, float]:
    """What actions wait that ask for their value while its sender is computing."""
    waits = {}
    for action in posted_last(table):
        s, op, _ = action
        hop = hops[s - 1] if op is Op.F else hops[s]
        assert hop is not None
        size = stages[s - 1].send_bytes if op is Op.F else stages[s].receive_grad_bytes
        source = s - 1 if op is Op.F else s + 1
        row = table.order[table.placement[s]]
        place = row.index(action)
        asked = ends[row[place - 1]] if place else 0.0
        way = hop.latency_s + size / hop.bytes_per_s if size else 0.0
        busy = False
        for other in table.order[table.placement[source]]:
            seconds = dict(zip("FBIW", stages[other.stage].times, strict=True))[other.op.value] + overhead
            if ends[other] > asked:
                busy = ends[other] - seconds <= (asked + way) * (1 + 1e-9)
                break
        if busy:
            waits[action] = hop.late_s
    return waits


def _run(
    table: Schedule,
    stages: Sequence[StageCost],
    hops: Sequence[Link | None],
    overhead: float,
    waits: dict[Action, float],
) -> tuple[dict[Action, float], float, tuple[int, ...]]:
    ends: dict[Action, float] = {}
    places, now = [0] * table.ranks, [0.0] * table.ranks
    held = [0] * table.ranks
    with_gradients: set[int] = set()
    for s, rank in enumerate(table.placement):
        before, behind = kept_by(table)[s]
        buffers = before * stages[s].receive_bytes + behind * stages[s].send_bytes
        held[rank] += stages[s].parameter_bytes + stages[s].optimizer_bytes + buffers
    peaks = list(held)
    while any(places[r] < len(row) for r, row in enumerate(table.order)):
        for rank, row in enumerate(table.order):
            if places[rank] == len(row):
                continue
            s, op, b = row[places[rank]]
            arrival: float | None = 0.0
            if op is Op.F and s > 0:
                arrival = _arrival(ends.get(Action(s - 1, Op.F, b)), hops[s - 1], stages[s - 1].send_bytes)
            elif op in (Op.B, Op.I) and s < table.stages - 1:
                made = ends.get(Action(s + 1, Op.B, b), ends.get(Action(s + 1, Op.I, b)))
                arrival = _arrival(made, hops[s], stages[s].receive_grad_bytes)
            if arrival is None:
                continue
            cost = stages[s]
            seconds = dict(zip("FBIW", cost.times, strict=True))[op.value] + overhead
            asked = now[rank] + waits.get(Action(s, op, b), 0.0)
            now[rank] = ends[Action(s, op, b)] = max(asked, arrival) + seconds
            kept = cost.held_after_forward_bytes
            if op is Op.W and s not in with_gradients:
                held[rank] += cost.gradient_bytes
                with_gradients.add(s)
            peaks[rank] = max(peaks[rank], held[rank] + cost.workspace_bytes)
            if op is Op.B and s not in with_gradients:
                peaks[rank] = max(peaks[rank], held[rank] - kept + cost.first_backward_bytes)
                held[rank] += cost.gradient_bytes
                with_gradients.add(s)
            left = cost.held_after_input_grad_bytes
            held[rank] += {"F": kept, "B": -kept, "I": left - kept, "W": -left}[op.value]
            peaks[rank] = max(peaks[rank], held[rank])
            places[rank] += 1
    for s, rank in enumerate(table.placement):
        peaks[rank] = max(peaks[rank], held[rank] + stages[s].workspace_bytes)
        now[rank] += stages[s].optimizer_s
    return ends, max(now), tuple(peaks)


def _arrival(made: float | None, hop: Link | None, size: int) -> float | None:
    if made is None:
        return None
    return made if hop is None or not size else made + hop.latency_s + size / hop.bytes_per_s
