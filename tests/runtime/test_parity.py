"""How differences are measured; whole models are in test_runner.py."""

from __future__ import annotations

import math

import torch
from torch import nn

from autopipe.runtime.checking.parity import RankParity, difference, has_dropout, relative, without_dropout


def test_difference_is_relative_to_the_largest_reference_value() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert difference(torch.tensor([1.0, -3.0]), expected, 4.0) == 0.25


def test_a_gradient_of_nothing_but_rounding_is_held_against_the_models_largest() -> None:
    noise = torch.tensor([1e-9, -2e-9])
    assert math.isclose(difference(-noise, noise, 1.0), 4e-9, rel_tol=1e-5)
    assert difference(-noise, noise, 4e-9) == 2.0


def test_missing_and_non_finite_gradients_are_seen() -> None:
    assert difference(None, torch.ones(2), 1.0) == 1.0
    assert difference(torch.ones(2), None, 1.0) == math.inf
    assert difference(None, None, 1.0) == 0.0
    assert math.isnan(difference(torch.tensor([math.nan]), torch.ones(1), 1.0))
    result = RankParity()
    for name, value in [("bias", 0.5), ("weight", math.nan), ("other", 0.7)]:
        result.note(name, value)
    assert result.worst == "weight"
    assert math.isnan(result.max_gradient_difference)
    assert math.isnan(relative([1.0, math.nan, 2.0], [1.0, 1.0, 2.0]))
    assert math.isnan(relative([math.nan, 1.0], [1.0, 1.0]))


def test_a_counter_must_be_equal() -> None:
    assert difference(torch.tensor(3), torch.tensor(3), 0.0) == 0.0
    assert difference(torch.tensor(3), torch.tensor(4), 0.0) == math.inf


def test_dropout_is_found_in_modules_and_numbers_and_turned_off() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.1

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), Attention())
    assert has_dropout(model)
    assert not has_dropout(without_dropout(model))
    assert model[1].p == 0.0
