"""A torch that does something otherwise is told, with its version and what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from autopipe.core.errors import AutopipeError
from autopipe.runtime.tables import torch_facts
from autopipe.runtime.tables.torch_facts import check_torch, problems


def test_this_torch_is_as_it_must_be() -> None:
    check_torch()
    assert [*problems()] == []
    assert torch.__version__.startswith(torch_facts.TRIED)


def raised() -> str:
    with pytest.raises(AutopipeError) as caught:
        check_torch()
    return str(caught.value)


@pytest.mark.parametrize("name", ["_PipelineScheduleRuntime", "_Action", "_ComputationType", "_add_send_recv"])
def test_a_name_that_is_gone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(torch_schedules, name)
    assert f"torch {torch.__version__} has no torch.distributed.pipelining.schedules.{name}" in raised()
    assert "runs pipelines on torch 2.13 and 2.14; install one of them" in raised()


def test_an_argument_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any) -> None: ...

    monkeypatch.setattr(torch_schedules._PipelineScheduleRuntime, "_step_microbatches", step)
    assert "has no argument return_outputs in _PipelineScheduleRuntime._step_microbatches" in raised()


def test_a_method_of_a_stage_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (PipelineStage, *PipelineStage.__mro__):
        if "backward_weight_one_chunk" in vars(owner):
            monkeypatch.delattr(owner, "backward_weight_one_chunk")
    assert "has no PipelineStage.backward_weight_one_chunk" in raised()


def test_another_text_of_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_schedules._Action, "__str__", lambda self: "F2")
    assert "writes F2 for 2F10" in raised()


def test_another_place_of_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that puts receives in front of the row would deadlock where transfers block."""
    lower = torch_schedules._add_send_recv

    def early(*args: Any) -> Any:
        return {rank: sorted(row, key=lambda a: "RECV" not in str(a)) for rank, row in lower(*args).items()}

    monkeypatch.setattr(torch_schedules, "_add_send_recv", early)
    assert "lowers rank 0 of 1F1B to '0RECV_B0 0RECV_B1 0F0" in raised()


def test_a_lowering_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(actions: Any, stage_to_rank: Any, num_stages: Any, mesh: Any) -> None: ...

    monkeypatch.setattr(torch_schedules, "_add_send_recv", fails)
    assert "does not lower 1F1B (TypeError" in raised()
