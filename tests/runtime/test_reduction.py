"""How losses add up over micro-batches is found; what does not add up is told, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.reduction import MEAN, Reduction
from autopipe.runtime.checking.reduction import find_reduction
from autopipe.runtime.running.shares import pieces, shares
from autopipe.runtime.workload import Workload, rows


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


def _masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target >= 0).float()
    return (output.square().sum(1) * mask).sum() / mask.sum().clamp(min=1)


def _contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output @ output.t(), torch.arange(len(output)))


class _Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def _net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3))


@pytest.mark.parametrize("middle", [(), (nn.Dropout(0.5),), (nn.LayerNorm(8),)])
def test_a_mean_over_rows_adds_up(middle: tuple[nn.Module, ...]) -> None:
    assert find_reduction(_workload(_net(*middle), _mean), "float32") == (MEAN, None)


def test_a_sum_is_added() -> None:
    reduction, told = find_reduction(_workload(_net(), _sum), "float32")
    assert reduction == Reduction("sum")
    assert "a sum over rows" in str(told)


def test_a_mean_over_what_one_half_of_the_batch_lacks_is_no_sum() -> None:
    def example_batch(size: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        return (torch.randn(size, 6),), torch.tensor([-100, -100, 1, 2])[torch.arange(size) % 4]

    torch.manual_seed(0)
    reduction, _ = find_reduction(Workload("model.py", _net(), example_batch, _masked), "float32")
    assert reduction == Reduction("count", "target", -100)


@pytest.mark.parametrize("loss", [_uneven, _masked])
def test_a_mean_over_unequal_counts_is_found_with_what_it_counts(loss: Any) -> None:
    reduction, told = find_reduction(_workload(_net(), loss), "float32")
    assert reduction == Reduction("count", "target", -100)
    assert "a mean over target other than -100" in str(told)


@pytest.mark.parametrize("name", ["labels", "mask"])
def test_what_counts_may_be_an_input_of_a_model_that_has_its_own_loss(name: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.embed(ids))[:, :-1]
            if name == "mask":
                losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
                return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()
            return nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:])

    def example_batch(size: int) -> tuple[dict[str, torch.Tensor], None]:
        ids, length = torch.randint(0, 9, (size, 7)), 3 + torch.arange(size)[:, None]
        there = torch.arange(7) < length
        return {"ids": ids, "labels": ids.masked_fill(~there, -100), "mask": there.float()}, None

    torch.manual_seed(0)
    found, _ = find_reduction(Workload("model.py", Own(), example_batch, lambda output, target: output), "float32")
    known = {"labels": Reduction("count", "inputs.labels", -100, 1), "mask": Reduction("count", "inputs.mask", None, 1)}
    assert found in known.values()  # both count the same


@pytest.mark.parametrize(
    ("middle", "loss", "cause"),
    [
        ((nn.BatchNorm1d(8),), _mean, "batch statistics, as in 1, are those of a micro-batch"),
        ((_Noise(),), _mean, "draws random numbers"),
        ((), _contrastive, "a contrastive loss"),
    ],
)
def test_what_cannot_add_up_is_told_with_its_size_and_cause(middle: Any, loss: Any, cause: str) -> None:
    reduction, told = find_reduction(_workload(_net(*middle), loss), "float32")
    assert reduction == MEAN
    assert cause in str(told)
    assert "%" in str(told)


def test_gradients_that_are_no_numbers_are_no_equal_ones() -> None:
    """Each half has no third row: its loss is 0 / 0."""

    def later(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counted = (torch.arange(len(output)) > 1).float()
        return (output.square().sum(1) * counted).sum() / counted.sum()

    reduction, told = find_reduction(_workload(_net(), later), "float32")
    assert reduction == MEAN
    assert "not finite" in str(told)


@pytest.mark.parametrize("loss", [_mean, _sum, _uneven])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_shares_give_the_whole_batchs_gradient_at_any_cut(loss: Any, size: int) -> None:
    model = _net()
    workload = _workload(model, loss)
    reduction, _ = find_reduction(workload, "float32")
    model.zero_grad()
    inputs, target = workload.batch(10)
    loss(model(*inputs), target).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    cuts = pieces(10, size)
    for cut, share in zip(cuts, shares(reduction, inputs, target, cuts), strict=True):
        x, y = rows((inputs, target), *cut)
        if share:
            (loss(model(*x), y) * share).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6)


def test_a_batch_without_the_counted_tensor_is_refused() -> None:
    with pytest.raises(ModelError, match=r"weighs micro-batches by inputs\.labels"):
        shares(Reduction("count", "inputs.labels", -100), {"ids": torch.ones(2)}, None, [(0, 2)])


def test_reductions_that_cannot_be_meant_are_refused() -> None:
    for wrong in (("product",), ("count",), ("mean", "target")):
        with pytest.raises(UsageError):
            Reduction(*wrong)


def test_a_batch_that_does_not_fit_is_said_and_no_error() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > 2:
            raise MemoryError("no room")
        return ((output - target) ** 2).mean()

    def example(size: int) -> tuple[tuple[torch.Tensor], torch.Tensor]:
        return (torch.ones(size, 3),), torch.zeros(size, 1)

    workload = Workload("small", nn.Linear(3, 1), example, loss)
    reduction, told = find_reduction(workload, "float32")
    assert reduction == MEAN
    assert "a batch of 4 does not fit" in str(told)
    other = replace(workload, loss_fn=lambda output, target: 1 / 0)
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        find_reduction(other, "float32")
