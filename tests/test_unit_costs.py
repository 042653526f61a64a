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
}


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", TABLE)
def test_unit_costs(name: str, size: int) -> None:
    ranks, batches = ((4, 8), (8, 16))[size]
    makespan, peak = TABLE[name][size]
    chosen = kind(name)
    per_rank = 1 if chosen.takes(1) and chosen.stages_per_rank else 2
    part = 1 / per_rank
    times = [StageTimes(part, 2 * part, part, part)] * (ranks * per_rank)
    table = chosen.schedule(ranks, batches, stages_per_rank=per_rank, times=times)
    stages = [stage(part, 2 * part)] * len(times)
    assert simulate(table, stages, [None] * (len(times) - 1)).step_s <= makespan
    assert max(peaks(table)) <= peak


def test_zb_v_with_few_micro_batches_beats_torchs_order() -> None:
    table = kind("ZB-V").schedule(4, 4, stages_per_rank=2, times=[StageTimes(0.5, 1, 0.5, 0.5)] * 8)
    assert simulate(table, [stage(0.5, 1)] * 8, [None] * 7).step_s == 13.5
