"""What the code relies on in torch's pipeline runtime, one test a fact: a new torch may change it."""

from __future__ import annotations

import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.errors import AutopipeError
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import Action, kind
from autopipe.runtime import torch_ir
from tests.synthetic import random_schedule


def test_actions_have_the_text_of_torchs() -> None:
    for text in ("2F0", "1I3", "0W1", "12B10"):
        action = Action.parse(text)
        assert str(torch_ir.to_torch(action)) == str(action) == text
        assert torch_schedules._Action.from_str(text) == torch_ir.to_torch(action)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_torch_lowers_our_tables(name: str, ranks: int, micro_batches: int) -> None:
    schedule = kind(name).schedule(ranks, micro_batches)
    table = {rank: [torch_ir.to_torch(action) for action in row] for rank, row in enumerate(schedule.order)}
    lowered = torch_schedules._add_send_recv(table, lambda stage: schedule.placement[stage], schedule.stages)
    sends = [action for row in lowered.values() for action in row if "SEND" in str(action)]
    assert len(sends) == 2 * (ranks - 1) * micro_batches
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


def test_a_torch_that_lacks_something_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ir.check_torch()
    monkeypatch.delattr(torch_schedules, "_PipelineScheduleRuntime")
    with pytest.raises(AutopipeError, match=f"torch {torch.__version__.split('+')[0]}.*_PipelineScheduleRuntime"):
        torch_ir.check_torch()
