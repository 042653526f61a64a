"""Losses and models whose micro-batches do not add up to the batch are told, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.runtime.reduction import micro_batch_note
from autopipe.runtime.workload import Workload


def _workload(model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> Workload:
    def example_batch(size: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return (torch.randn(size, 6),), torch.arange(size) % 3 - (torch.arange(size) < 1).long() * 100

    torch.manual_seed(0)
    return Workload("model.py", model, example_batch, loss)


def _mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def _uneven(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target, ignore_index=-100)


def _net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


@pytest.mark.parametrize("middle", [(), (nn.Dropout(0.5),), (nn.LayerNorm(8),)])
def test_a_mean_over_rows_adds_up(middle: tuple[nn.Module, ...]) -> None:
    assert micro_batch_note(_workload(_net(*middle), _mean), "float32") is None


def test_a_sum_is_told() -> None:
    assert "a sum over rows" in str(micro_batch_note(_workload(_net(), _sum), "float32"))


def test_batch_statistics_are_named() -> None:
    note = micro_batch_note(_workload(_net(nn.BatchNorm1d(8)), _mean), "float32")
    assert "batch statistics, as in 1, are those of a micro-batch" in str(note)


def test_a_mean_over_unequal_counts_is_told_with_its_size() -> None:
    note = str(micro_batch_note(_workload(_net(), _uneven), "float32"))
    assert "unequal numbers of tokens" in note
    assert "%" in note


def test_the_model_is_left_as_it_was() -> None:
    model = _net(nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    micro_batch_note(_workload(model, _mean), "float32")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
