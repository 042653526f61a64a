"""The counter of live tensors against sizes worked out by hand."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn

from autopipe.runtime.capture import capture
from autopipe.runtime.measuring.unit_bytes import unit_bytes
from autopipe.runtime.ranks.launch import launch
from autopipe.runtime.ranks.memory import LiveBytes, unique_bytes
from autopipe.runtime.stages.chain import Chain
from benchmarks.memory import SCHEDULES, measure_model


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


def test_the_last_layer_holds_the_models_output_as_the_runtime_does() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32))
    inputs = torch.randn(4, 8)
    captured = capture(model, (inputs,))
    chains = [
        Chain(captured, [(0, 1), (1, 2)], lambda output, _: output.sum(), torch.device("cpu"), deferred=deferred)
        for deferred in (False, True)
    ]
    for chain in chains:
        chain.run(captured.bind((inputs,)), None)  # gradients are there from now on
    first, last = unit_bytes(*chains, captured.bind((inputs,)), None)
    assert first.held_after_forward == 4 * 16 * 4  # what the second Linear keeps
    assert last.held_after_forward == 4 * 32 * 4 + 4  # its output, which sum() does not keep, and the loss


@pytest.mark.slow
def test_peaks_are_never_much_higher_than_predicted() -> None:
    rows = [row for rank in launch(measure_model, ("examples/mlp.py", 64, 4), ranks=2, timeout_s=120) for row in rank]
    assert len(rows) == 2 * 2 * len(SCHEDULES)
    errors = [row.predicted / row.measured - 1 for row in rows]
    assert min(errors) > -0.05
    assert statistics.median(map(abs, errors)) <= 0.05
