"""Timing layers: what a rotation leaves behind, and what it sees."""

from __future__ import annotations

import torch

from autopipe.runtime.capture import capture
from autopipe.runtime.measuring.measure import LayerTimer
from tests.runtime.ranks import Ranks


def _timed_after_gradients_were_dropped() -> tuple[list[bool], list[int]]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    inputs, target = (torch.randn(4, 3),), torch.randn(4, 2)
    captured = capture(model, inputs)
    timer = LayerTimer(captured, [1], {4: (inputs, target)}, torch.nn.functional.mse_loss, "sgd", torch.device("cpu"))
    model.zero_grad(set_to_none=True)
    timer._keep_gradients()
    kept = [parameter.grad is not None for parameter in model.parameters()]
    timer.rotate()
    return kept, [len(rows) for rows in timer.samples[4].units.values()]


def test_backwards_are_timed_adding_to_gradients(ranks: Ranks) -> None:
    kept, rows = ranks.run(_timed_after_gradients_were_dropped, ranks=1)[0]
    assert kept == [True] * 4
    assert set(rows) == {1}
