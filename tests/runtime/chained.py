"""Stages of one process, run one after another with detached boundaries, against the model in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from autopipe.runtime.capture import Captured, capture
from autopipe.runtime.capture.restoring import same_attributes
from autopipe.runtime.checking.draws import same_draws
from autopipe.runtime.checking.parity import difference, largest_magnitude, restore_state, saved_state
from autopipe.runtime.stages.modules import StageModule, build_stages
from tests.models import Case

TOLERANCE = 2e-6


def captured_case(case: Case, *, seed: int = 0, batch: int = 4) -> Captured:
    """A case of the zoo, built and captured."""
    torch.manual_seed(seed)
    model = case.build_model()
    inputs, target = case.example_batch(batch)
    return capture(model, inputs, loss=lambda output: case.loss_fn(output, target))


def in_float64(case: Case) -> Case:
    """The case with parameters and batches in float64, where sums in another order agree to many more digits."""

    def widened(value: Any) -> Any:
        return tree_map(
            lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, value
        )

    return replace(
        case,
        build_model=lambda: case.build_model().double(),
        example_batch=lambda n: widened(case.example_batch(n)),
    )


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def reference_of(case: Case, model: nn.Module) -> nn.Module:
    """Another model of the case with the same state; not every model can be copied."""
    torch.manual_seed(0)
    reference = case.build_model()
    reference.load_state_dict(model.state_dict())
    for buffer, other in zip(model.buffers(), reference.buffers(), strict=True):
        other.copy_(buffer)  # those that are not persistent too
    return reference


def eager(case: Case, model: nn.Module, batches: Sequence[Any]) -> list[float]:
    losses = []
    for inputs, target in batches:
        loss = case.loss_fn(call(model, inputs), target) / len(batches)
        forward = saved_state(model)
        loss.backward()
        restore_state(model, forward)  # a checkpoint that repeats a norm changes them again
        losses.append(loss.item())
    return losses


def chained(
    case: Case, captured: Captured, stages: Sequence[StageModule], batches: Sequence[Any], *, wait: bool = False
) -> list[float]:
    """The losses; with ``wait`` the weight gradients of all micro-batches come after the last backward."""
    losses, waiting = [], []
    for inputs, target in batches:
        bound = captured.bind(inputs)
        runs: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
        sent: tuple[torch.Tensor, ...] = ()
        for stage in stages:
            received = tuple(
                tensor.detach().clone().requires_grad_(edge.needs_gradient)
                for tensor, edge in zip(sent, stage.receives, strict=True)
            )
            sent = stage(*received, **bound)
            check_metadata(stage, sent, next(iter(bound.values())).shape[0])
            runs.append((received, sent))
        loss = case.loss_fn(captured.unflatten(sent), target) / len(batches)
        losses.append(loss.item())
        loss.backward()
        for number in reversed(range(len(stages))):
            received, made = runs[number]
            if number < len(stages) - 1:
                gradients = [tensor.grad for tensor in runs[number + 1][0]]
                backward(stages[number], made, gradients)
            if stages[number].deferred:
                work = stages[number].weight_backward()
                waiting.append(work) if wait else work()
    for work in waiting:
        work()
    return losses


def backward(stage: StageModule, made: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """As torch's runtime does it: zeros where a later stage reads a value without differentiating it."""
    pairs = [(t, g) for t, g, edge in zip(made, gradients, stage.sends, strict=True) if edge.needs_gradient]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [torch.zeros_like(t) if g is None else g for t, g in pairs])


def check_metadata(stage: StageModule, made: Sequence[torch.Tensor], micro_batch: int) -> None:
    """What a stage returns is what its static metadata says."""
    for tensor, meta in zip(made, stage.output_args(micro_batch), strict=True):
        assert tensor.shape == meta.shape
        assert tensor.dtype == meta.dtype
        if stage.sends:
            assert tensor.requires_grad == meta.requires_grad
            assert tensor.is_contiguous()


def legal_cuts(captured: Captured) -> list[int]:
    return [number + 1 for number, layer in enumerate(captured.layers[:-1]) if layer.cut_after]


def assert_trains_alike(
    case: Case,
    captured: Captured,
    cuts: Sequence[int],
    *,
    steps: int = 2,
    sizes: Sequence[int] = (4, 4, 4, 4),
    wait: bool = False,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """SGD steps on stages and in eager mode: losses, every gradient, parameter and buffer."""
    model = captured.model
    model.zero_grad()
    reference = reference_of(case, model)
    stages = build_stages(captured, cuts, **options)
    with same_attributes(model):
        for step in range(steps):
            torch.manual_seed(step)
            batches = [case.example_batch(size) for size in sizes]
            with same_draws(captured):
                expected = eager(case, reference, batches)
                found = chained(case, captured, stages, batches, wait=wait)
            assert_same(captured, reference, found, expected, tolerance)
            take_steps(model, reference)


def assert_same(
    captured: Captured,
    reference: nn.Module,
    losses: Sequence[float],
    expected: Sequence[float],
    tolerance: float = TOLERANCE,
) -> None:
    """Losses, gradients and buffers of a step."""
    assert losses == pytest.approx(expected, rel=tolerance, abs=1e-3 * tolerance)
    _assert_same_gradients(captured.model, reference, tolerance)
    for (name, buffer), other in zip(captured.model.named_buffers(), reference.buffers(), strict=True):
        assert torch.allclose(buffer.double(), other.double(), rtol=1e-6, atol=1e-7), name


@torch.no_grad()
def take_steps(*models: nn.Module) -> None:
    """A step of plain SGD in each."""
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if parameter.grad is not None:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def _assert_same_gradients(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    named = dict(reference.named_parameters())
    most = largest_magnitude(p.grad for p in named.values())
    for name, parameter in model.named_parameters():
        expected = named[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            assert difference(parameter.grad, expected, most) <= tolerance, name
