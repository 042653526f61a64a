"""The counter of live tensors against sizes worked out by hand."""

from __future__ import annotations

import torch
from torch import nn

from autopipe.runtime.memory import LiveBytes, unique_bytes


def test_linear_gelu_linear_holds_what_autograd_saves() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    inputs = torch.randn(64, 256)
    parameters = unique_bytes(model.parameters())
    with LiveBytes(model.parameters()) as live:
        assert live.current == parameters
        output = model(inputs)
        hidden, result = 64 * 1024 * 4, 64 * 256 * 4
        assert live.current - parameters == 2 * hidden + result  # GELU keeps its input, the second Linear its own
        loss = output.sum()
        loss.backward()
        del output, loss
        assert live.current == 2 * parameters  # gradients
        model.zero_grad()
        assert live.current == parameters
    assert live.peak > 2 * parameters


def test_a_view_shares_its_base_and_labels_tell_who_made_what() -> None:
    with LiveBytes() as live:
        live.label = 1
        base = torch.zeros(100)
        view = base[10:20]
        live.label = 2
        other = torch.zeros(50)
        assert live.current == 600
        assert live.by_label() == {1: 400, 2: 200}
        del base
        assert live.by_label() == {1: 400, 2: 200}
        del view, other
        assert live.current == 0
        live.reset_peak()
        assert live.peak == 0


def test_unique_bytes_counts_a_storage_once() -> None:
    base = torch.zeros(100)
    assert unique_bytes([base, base[:10], None, torch.zeros(10)]) == 440
