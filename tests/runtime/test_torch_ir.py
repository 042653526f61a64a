"""What the code relies on in torch's pipeline runtime, one test a fact: a new torch may change it."""

from __future__ import annotations

import csv
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import autopipe.synthesis  # noqa: F401  (registers them)
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import Action, Kind, kind, kinds
from autopipe.core.table_csv import to_csv
from autopipe.runtime.tables import torch_ir
from tests.synthetic import random_schedule


def test_actions_have_the_text_of_torchs() -> None:
    for text in ("2F0", "1I3", "0W1", "12B10"):
        action = Action.parse(text)
        assert str(torch_ir.to_torch(action)) == str(action) == text
        assert torch_schedules._Action.from_str(text) == torch_ir.to_torch(action)


def per_rank(chosen: Kind) -> int:
    """Two stages on a rank for the schedules that take them."""
    return (chosen.stages_per_rank or (2,))[-1]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 7)])
@pytest.mark.parametrize("chosen", kinds("torch"), ids=lambda chosen: chosen.name)
def test_torch_reads_our_csv(chosen: Kind, ranks: int, micro_batches: int, tmp_path: Path) -> None:
    schedule = chosen.schedule(ranks, micro_batches, stages_per_rank=per_rank(chosen))
    (tmp_path / "table.csv").write_text(to_csv(schedule))
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = [[torch_schedules._Action.from_str(cell) for cell in line] for line in csv.reader(file)]
    assert rows == [[torch_ir.to_torch(action) for action in row] for row in schedule.order]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 7)])
@pytest.mark.parametrize("chosen", kinds("torch"), ids=lambda chosen: chosen.name)
def test_torch_lowers_our_tables(chosen: Kind, ranks: int, micro_batches: int) -> None:
    schedule = chosen.schedule(ranks, micro_batches, stages_per_rank=per_rank(chosen))
    table = {rank: [torch_ir.to_torch(action) for action in row] for rank, row in enumerate(schedule.order)}
    lowered = torch_schedules._add_send_recv(table, lambda stage: schedule.placement[stage], schedule.stages)
    sends = [action for row in lowered.values() for action in row if "SEND" in str(action)]
    hops = sum(a != b for a, b in itertools.pairwise(schedule.placement))
    assert len(sends) == 2 * hops * micro_batches
    for rank, row in enumerate(schedule.order):
        computed = [str(action) for action in lowered[rank] if action.is_compute_op]
        assert computed == [str(action) for action in row]


@given(st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_receive_that_is_posted_last_is_so_in_torchs_lowering(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    table = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 5))
    actions = {rank: [torch_ir.to_torch(action) for action in row] for rank, row in enumerate(table.order)}
    lowered = torch_schedules._add_send_recv(actions, lambda stage: table.placement[stage], table.stages)
    last = set()
    for row in lowered.values():
        posted: list[str] = []
        for action in row:
            if action.is_compute_op:
                last |= {str(action) for text in posted if _receives(text, str(action))}
                posted = []
            elif "RECV" in str(action):
                posted.append(str(action))
    assert {str(action) for action in posted_last(table)} == last


def _receives(received: str, action: str) -> bool:
    """Whether ``1RECV_F0`` brings what ``1F0`` needs, or ``1RECV_B0`` what ``1B0`` or ``1I0`` does."""
    stage, kind, batch = re.fullmatch(r"(\d+)RECV_([FB])(\d+)", received).groups()  # type: ignore[union-attr]
    return action in ({f"{stage}F{batch}"} if kind == "F" else {f"{stage}B{batch}", f"{stage}I{batch}"})


STOCK = {
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 12), (5, 10)])
@pytest.mark.parametrize("name", STOCK)
def test_the_order_is_that_of_torchs_own_class(name: str, ranks: int, micro_batches: int) -> None:
    rounds = max(1, micro_batches // ranks)
    stock = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=2,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    schedule = kind(name).schedule(ranks, micro_batches, stages_per_rank=2)
    for rank, row in enumerate(schedule.order):
        theirs = STOCK[name]._calculate_single_rank_operations(stock, rank)
        cells = [",".join(map(str, action.sub_actions or (action,))) for action in theirs if action is not None]
        assert ",".join(cells) == ",".join(map(str, row))


def test_the_order_of_looped_bfs_is_torchs_but_for_its_backwards() -> None:
    """Torch runs a stage's backwards from the last micro-batch on, which the first one's gradient then waits for."""
    stock = SimpleNamespace(pp_group_size=2, _n_microbatches=3, _stages=[None, None])
    stock.n_local_stages = 2
    theirs = torch_schedules.ScheduleLoopedBFS._calculate_single_rank_operations(stock, 1)
    ours = kind("LoopedBFS").schedule(2, 3, stages_per_rank=2).order[1]
    plain = [str(action) for action in theirs if action is not None]
    assert plain[:6] == [str(action) for action in ours[:6]]
    assert plain[6:] == ["3B2", "3B1", "3B0", "1B2", "1B1", "1B0"]
