"""Losses and gradients of the pipeline against one process that runs the model as it is.

Both run the same micro-batches in order, accumulate, and take the same plain SGD steps; dropout is off in both. With
replicas, one process runs the micro-batches of all of them. Each difference is relative to the largest reference value
of its tensor. A gradient that is nothing but rounding (its largest value below 16 ε of the model's largest gradient, as
for a bias before a softmax) is held against the model's largest gradient instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopipe.runtime.capture.restoring import Plain
from autopipe.runtime.checking.draws import same_draws
from autopipe.runtime.ranks import launch
from autopipe.runtime.running.batches import share_of
from autopipe.runtime.running.runner import Runner
from autopipe.runtime.running.shares import pieces, shares
from autopipe.runtime.workload import Inputs, Workload, batch_size, call, rows

STEPS = 2
LEARNING_RATE = 1e-3
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_DROPOUT = re.compile(r"drop")


@dataclass
class RankParity:
    """What one rank found: losses on the last stage's rank only, the largest difference and its tensor's name.

    ``drawn`` says that the forward drew random numbers, which were equal ones in both runs; see draws.py.
    """

    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    max_gradient_difference: float = 0.0
    worst: str = ""
    drawn: bool = False

    def note(self, name: str, value: float) -> None:
        """Keep a tensor's difference if it is the largest so far; no number is the worst of all."""
        known = self.max_gradient_difference
        if not (value <= known or math.isnan(known)):
            self.max_gradient_difference, self.worst = value, name


def has_dropout(model: nn.Module) -> bool:
    """Whether any module asks for dropout in training."""
    return any(_dropout_rates(module) for module in model.modules())


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout probability set to 0, in place."""
    for module in model.modules():
        for holder, name in _dropout_rates(module):
            setattr(holder, name, 0.0)
    return model


def _dropout_rates(module: nn.Module) -> list[tuple[Any, str]]:
    """Objects and names of non-zero dropout probabilities: of the module itself and of its configuration."""
    holders = [module, *(getattr(module, name) for name in ("config",) if hasattr(module, name))]
    found = []
    for holder in holders:
        for name, value in vars(holder).items():
            if isinstance(value, float) and value > 0 and (_DROPOUT.search(name) or isinstance(module, _DROPOUTS)):
                found.append((holder, name))
    return found


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def compare(runner: Runner, reference: nn.Module, workload: Workload, batch: tuple[Inputs, Any]) -> RankParity:
    """Run both for a few steps and compare this rank's part."""
    result, one_process = RankParity(), OneProcess(reference, workload, runner)
    parts = runner.split(*batch)
    for step in range(STEPS):
        launch.beat.phase(f"comparing step {step + 1} of {STEPS} with one process")
        with same_draws(runner.captured) as draws:
            losses = runner.backward(parts)
            launch.beat("the step of one process")
            expected = one_process.step(batch)
        result.drawn |= draws.drawn
        result.losses += [float(torch.stack(losses).detach().double().sum())] if losses else []
        result.reference_losses.append(expected)
        note_gradients(result, runner.modules, reference)
        for model in (reference, *runner.modules):
            _sgd(model)
        note_buffers(result, runner.modules, reference)
    return result


class OneProcess:
    """A model as it is, which runs the micro-batches of all replicas.

    Each replica begins a step with the same buffers, and those of replica 0 are kept; so it is with parameters that a
    forward changes. What a replica leaves in plain attributes only itself finds there again.
    """

    def __init__(self, model: nn.Module, workload: Workload, runner: Runner) -> None:
        self._model, self._workload, self._runner = model, workload, runner
        self._changed = runner.captured.changed_state()
        self._plain = [Plain.of(model)] * runner.replica.count

    def step(self, batch: tuple[Inputs, Any]) -> float:
        """Gradients of share × loss over the micro-batches of all replicas, accumulated in order; the loss."""
        model, count = self._model, len(self._plain)
        cuts = pieces(batch_size(batch[0]), self._runner.micro_batch)
        counts = dict(zip(cuts, shares(self._runner.reduction, *batch, cuts), strict=True))
        total, before, kept = 0.0, saved_state(model, self._changed), None
        for index in range(count):
            restore_state(model, before)
            self._plain[index].put_back()
            total += sum(self._micro_batch(batch, cut, counts[cut]) for cut in share_of(cuts, index, count))
            self._plain[index] = Plain.of(model)
            kept = kept or saved_state(model, self._changed)
        restore_state(model, kept or before)
        return total

    def _micro_batch(self, batch: tuple[Inputs, Any], cut: tuple[int, int], share: float) -> float:
        inputs, target = rows(batch, *cut)
        output = call(self._model, inputs)
        if not share:
            return 0.0
        loss = self._workload.loss(output, target) * share
        forward = saved_state(self._model)
        loss.backward()
        restore_state(self._model, forward)  # what a checkpoint repeats changes them again, a stage does not
        return float(loss.detach())


def saved_state(model: nn.Module, parameters: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Copies of a model's buffers, and of the parameters that are named."""
    changing = ((name, parameter) for name, parameter in model.named_parameters() if name in parameters)
    return {name: tensor.detach().clone() for name, tensor in (*model.named_buffers(), *changing)}


@torch.no_grad()
def restore_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Put them back."""
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name in state:
            tensor.copy_(state[name])


def note_gradients(result: RankParity, modules: Iterable[nn.Module], reference: nn.Module) -> None:
    """The difference of every gradient of these parts of a model from the whole model's."""
    expected = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    most = largest_magnitude(expected.values())
    for module in modules:
        for name, parameter in module.named_parameters():
            result.note(name, difference(parameter.grad, expected[name], most))


def note_buffers(result: RankParity, modules: Iterable[nn.Module], reference: nn.Module) -> None:
    """The difference of every buffer that the whole model has too."""
    expected = dict(reference.named_buffers(remove_duplicate=False))
    for module in modules:
        for name, buffer in module.named_buffers():
            if name in expected:
                result.note(name, difference(buffer, expected[name], 0.0))


def difference(found: torch.Tensor | None, expected: torch.Tensor | None, largest: float) -> float:
    """The largest difference, relative as the module's docstring says; a missing gradient counts as zeros."""
    if expected is None:
        return 0.0 if found is None or not dense(found).any() else float("inf")
    if expected.numel() == 0:
        return 0.0
    expected = dense(expected)
    found = torch.zeros_like(expected) if found is None else dense(found)
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    scale = float(expected.abs().max())
    if scale < 16 * torch.finfo(expected.dtype).eps * largest:
        scale = largest
    gap = float((found.double() - expected.double()).abs().max())
    return gap / scale if scale else gap


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's real numbers one by one: those of a sparse one with its zeros, real and imaginary parts apart."""
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@torch.no_grad()
def _sgd(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
            parameter.grad = None


def relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return largest(abs(a - b) / abs(b) if b else abs(a) for a, b in zip(found, expected, strict=True))


def largest_magnitude(tensors: Iterable[torch.Tensor | None]) -> float:
    """The largest absolute value in any of these tensors; see ``largest``."""
    return largest(float(dense(t).abs().max()) for t in tensors if t is not None and t.numel())


def largest(values: Iterable[float]) -> float:
    """The largest, 0 of none; no number where any is none, which ``max`` would lose."""
    known = [*values]
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)
