"""What a run of a model gave, and whether another run gave the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference, relative to the largest value of the tensor; 2e-2 for shorter types."""
_SMALL = 1e-3
"""A tensor whose largest value is below this part of all tensors' largest is compared with that instead: a gradient
that is zero in theory is noise in practice."""


@dataclass(frozen=True)
class Outcome:
    """A forward and a backward: by name the output's leaves, gradients, and buffers after the forward; the loss."""

    outputs: Mapping[str, Any]
    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    buffers: Mapping[str, torch.Tensor]


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """What differs, in words. Outputs that were not found are not needed."""
    outputs = {name: value for name, value in expected.outputs.items() if name in found.outputs}
    return [
        *_differences(outputs, found.outputs, "differs"),
        *_differences({"the loss": expected.loss}, {"the loss": found.loss}, "differs"),
        *_differences(expected.gradients, found.gradients, "has another gradient"),
        *_differences(expected.buffers, found.buffers, "is another buffer"),
    ]


def named_leaves(leaves: Any) -> dict[str, Any]:
    """The tensors among an output's leaves, by their position."""
    return {f"output {n}": leaf.detach() for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], what: str) -> list[str]:
    tensors = [t for t in expected.values() if isinstance(t, torch.Tensor) and t.numel()]
    largest = max((_largest(t) for t in tensors), default=0.0)
    said = []
    for name, right in expected.items():
        wrong = _difference(right, found.get(name), largest * _SMALL)
        if wrong:
            said.append(f"{name} {what}: {wrong}")
    return said


def _difference(expected: Any, found: Any, floor: float) -> str:
    """What differs, in words; empty when nothing does."""
    if expected is None or found is None:
        return "" if expected is found else f"{_word(found)} instead of {_word(expected)}"
    if not isinstance(expected, torch.Tensor):
        return ""
    if torch.strided not in (expected.layout, found.layout):
        expected, found = expected.to_dense(), found.to_dense()
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{tuple(found.shape)} {found.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if expected.is_complex():
        return _difference(torch.view_as_real(expected), torch.view_as_real(found), floor)
    if not expected.is_floating_point():
        return "" if torch.equal(expected, found) else "other values"
    scale = max(_largest(expected), floor)
    if not torch.equal(expected.isfinite(), found.isfinite()):
        return "infinite or no number in other places"
    off = _largest(found.detach().double() - expected.detach().double())
    limit = TOLERANCE.get(expected.dtype, 2e-2) * scale
    return f"off by {off:.2g} of {scale:.2g}" if off > limit else ""


def _word(value: Any) -> str:
    return "none" if value is None else "one"


def _largest(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return float(tensor.abs().double().nan_to_num(posinf=0.0).max())
