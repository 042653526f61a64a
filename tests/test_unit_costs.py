"""Makespan and peak at F = I = W = 1 a rank, no transfers: what the papers' generators and torch give, or better."""

from __future__ import annotations

import pytest

import autopipe.schedules  # noqa: F401
from autopipe.core.schedule import StageTimes, kind
from autopipe.simulate import simulate
from tests.conformance import peaks
from tests.synthetic import stage

TABLE = {
    "GPipe": ((33, 8), (69, 16)),
    "1F1B": ((33, 4), (69, 8)),
    "Interleaved1F1B": ((28.5, 5.5), (58.5, 11.5)),
    "LoopedBFS": ((28.5, 8), (58.5, 16)),
    "ZB-H1": ((27, 4), (55, 8)),
    "ZB-H2": ((27, 7), (55, 15)),
    "ZB-1p": ((27, 4), (55, 8)),
    "ZB-2p": ((27, 8), (55, 16)),
    "ZB-V": ((25.5, 4), (51.5, 8)),
    "DualPipeV": ((25.5, 4.5), (51.5, 8.5)),
    "V-Half": ((26.5, 3), (56.5, 5)),
    "V-Min": ((29.5, 2), (61.5, 4)),
    "Chimera": ((29, 4), (65, 8)),
    "DualPipe": ((25, 5), (51, 9)),
}


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", TABLE)
def test_unit_costs(name: str, size: int) -> None:
    ranks, batches = ((4, 8), (8, 16))[size]
    makespan, peak = TABLE[name][size]
    chosen = kind(name)
    per_rank = 1 if chosen.takes(1) and chosen.stages_per_rank else 2
    part = 1 / per_rank
    count = len(chosen.place(ranks, per_rank))
    times = [StageTimes(part, 2 * part, part, part)] * count
    table = chosen.schedule(ranks, batches, stages_per_rank=per_rank, times=times)
    stages = [stage(part, 2 * part)] * len(times)
    assert simulate(table, stages, [None] * (len(times) - 1)).step_s <= makespan
    assert max(peaks(table)) * table.ways <= peak


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize(("backward_s", "factor"), [(1.0, 2.0), (2.0, 1.5)])
def test_the_idle_part_of_chimera_is_that_of_its_formula(ranks: int, backward_s: float, factor: float) -> None:
    times = [StageTimes(1.0, backward_s, backward_s / 2, backward_s / 2)] * (2 * ranks)
    table = kind("Chimera").schedule(ranks, ranks, times=times)
    line = simulate(table, [stage(1.0, backward_s)] * (2 * ranks), [None] * (2 * ranks - 1))
    assert line.idle == pytest.approx((ranks - 2) / (factor * ranks + ranks - 2))
    assert all(ranks / 2 + 1 <= 2 * peak <= ranks for peak in peaks(table)) or ranks == 2


@pytest.mark.parametrize(("ranks", "batches"), [(4, 8), (8, 16)])
def test_doubled_forwards_are_faster_where_a_backward_takes_twice_as_long(ranks: int, batches: int) -> None:
    steps = []
    for name in ("Chimera", "Chimera-Doubled"):
        table = kind(name).schedule(ranks, batches)
        steps.append(simulate(table, [stage(1.0, 2.0)] * (2 * ranks), [None] * (2 * ranks - 1)).step_s)
    assert steps[1] < steps[0]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["PipeDream", "PipeDream-Sync", "PipeDream-2BW", "PipeMare"])
def test_asynchronous_schedules_are_never_idle(name: str, ranks: int) -> None:
    table = kind(name).schedule(ranks, ranks)
    line = simulate(table, [stage(1.0, 2.0)] * ranks, [None] * (ranks - 1))
    assert line.step_s == pytest.approx(3.0 * ranks)
    assert line.idle == pytest.approx(0.0)
    assert peaks(table) == [ranks - rank for rank in range(ranks)]


def test_zb_v_with_few_micro_batches_beats_torchs_order() -> None:
    table = kind("ZB-V").schedule(4, 4, stages_per_rank=2, times=[StageTimes(0.5, 1, 0.5, 0.5)] * 8)
    assert simulate(table, [stage(0.5, 1)] * 8, [None] * 7).step_s == 13.5
