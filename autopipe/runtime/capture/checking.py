"""Run the graph on the example, and compare every output, gradient and buffer with the eager run.

torch.export is silently wrong for custom autograd functions, backward hooks and reentrant checkpoints; this is what
notices. The same run tells which values get a gradient: a wrong flag would hang torch's runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.runtime.capture.modes import modes_of, under
from autopipe.runtime.capture.observing import Loss, Reference, scalar, undisturbed
from autopipe.runtime.capture.opaque import call_of, is_opaque
from autopipe.runtime.capture.program import Program, named_tensors
from autopipe.runtime.capture.torch_private import tree_unflatten

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest difference, relative to the largest value of the tensor; 2e-2 for shorter types."""
_SMALL = 1e-3
"""A tensor whose largest value is below this part of all tensors' largest is compared with that instead: a gradient
that is zero in theory is noise in practice."""


@dataclass(frozen=True)
class Findings:
    """What running the graph told.

    ``gradients`` are the values that get one, ``dtypes`` those of the tensors, which autocast around the capture
    changes. ``differences`` from the eager run are in words; empty when there is none.
    """

    gradients: frozenset[fx.Node]
    dtypes: Mapping[fx.Node, torch.dtype]
    differences: tuple[str, ...]


class _Recorder(fx.Interpreter):
    """Runs a program and notes which of its values get a gradient."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.reached: set[fx.Node] = set()
        self.dtypes: dict[fx.Node, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        with under(modes_of(n)):
            if is_opaque(n):
                value: Any = call_of(n).run(self.map_nodes_to_values(n.args[1], n))  # type: ignore[arg-type]
            else:
                value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.dtypes[n] = value.dtype
        if n.op == "call_function" and isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: self.reached.add(n))
        return value


def run_and_compare(
    model: nn.Module, program: Program, tensors: Sequence[torch.Tensor], loss: Loss | None, reference: Reference
) -> Findings:
    """Run the graph as one stage on the example, forward and backward, and compare."""
    recorder = _Recorder(program)
    try:
        outcome = _run(recorder, model, program, tensors, loss)
    except RuntimeError as error:
        return Findings(frozenset(), {}, (f"running it fails: {' '.join(str(error).split())[:200]}",))
    if program.spec != reference.spec:
        return Findings(frozenset(), {}, ("its output has another structure",))
    if reference.weightless:
        return Findings(frozenset(recorder.reached), recorder.dtypes, ())
    expected = {name: value for name, value in _named(reference.outputs).items() if name in outcome.outputs}
    differences = [
        *_differences(expected, outcome.outputs, "differs"),
        *_differences({"the loss": reference.loss}, {"the loss": outcome.loss}, "differs"),
        *_differences(reference.gradients, outcome.gradients, "has another gradient"),
        *_differences(reference.buffers, outcome.buffers, "is another buffer"),
    ]
    return Findings(frozenset(recorder.reached), recorder.dtypes, tuple(differences))


@dataclass(frozen=True)
class _Outcome:
    """What the graph gave, by name."""

    outputs: dict[str, Any]
    loss: torch.Tensor
    gradients: dict[str, Any]
    buffers: dict[str, Any]


def _run(
    recorder: _Recorder, model: nn.Module, program: Program, tensors: Sequence[torch.Tensor], loss: Loss | None
) -> _Outcome:
    with undisturbed(model, tensors) as given:
        left, named = iter(given), named_tensors(model)
        holders = [n for n in program.graph.nodes if n.op == "placeholder"]
        state = {n: named.get(known.name, known.tensor) for n, known in program.state.items()}
        flat = recorder.run(*(state[n] if n in state else next(left) for n in holders))
        leaves = _leaves(program, flat)
        value, _ = scalar(leaves, loss, tree_unflatten(leaves, program.spec))
        buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        if value.requires_grad:
            value.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return _Outcome(_named(leaves), value.detach(), gradients, buffers)


def _named(leaves: Sequence[Any]) -> dict[str, Any]:
    return {f"output {n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _leaves(program: Program, flat: Sequence[Any]) -> list[Any]:
    """The output's leaves, from the tensors that the graph returns."""
    left = iter(flat)
    return [next(left) if isinstance(output, fx.Node) else output for output in program.outputs]


def _differences(expected: dict[str, Any], found: dict[str, Any], what: str) -> list[str]:
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
    return float(tensor.detach().abs().double().nan_to_num(posinf=0.0).max())
