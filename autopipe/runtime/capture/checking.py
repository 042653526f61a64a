"""Run the graph on the example, and compare every output, gradient and buffer with the eager run.

torch.export is silently wrong for custom autograd functions, backward hooks, reentrant checkpoints, and whatever a
forward leaves for the next one outside parameters and buffers; this is what notices. The same run tells which values
get a gradient: a wrong flag would hang torch's runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from autopipe.runtime.capture.comparing import Outcome, differences
from autopipe.runtime.capture.modes import modes_of, under
from autopipe.runtime.capture.observing import Loss, Reference, buffers_of, finished, other_rows, scalar
from autopipe.runtime.capture.opaque import call_of, is_opaque
from autopipe.runtime.capture.program import Program, named_tensors
from autopipe.runtime.capture.restoring import SEED, undisturbed
from autopipe.runtime.capture.torch_private import tree_unflatten


@dataclass(frozen=True)
class Findings:
    """What running the graph told.

    ``gradients`` are the values that get one, ``dtypes`` those of the tensors, which autocast around the capture
    changes. ``differences`` from the eager run are in words; empty when there is none. ``later`` says that only a
    second micro-batch differs.
    """

    gradients: frozenset[fx.Node]
    dtypes: Mapping[fx.Node, torch.dtype]
    differences: tuple[str, ...]
    later: bool = False


class _Recorder(fx.Interpreter):
    """Runs a program and notes which of its values get a gradient."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.reached: set[str] = set()
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
            # Names and no more: nothing frees a ring of self, parameters and torch's own nodes.
            value.register_hook(partial(_note, self.reached, n.name))
        return value


def _note(reached: set[str], name: str, gradient: torch.Tensor) -> None:
    reached.add(name)


def run_and_compare(
    model: nn.Module, program: Program, tensors: Sequence[torch.Tensor], loss: Loss | None, reference: Reference
) -> Findings:
    """Run the graph as one stage on the example, forward and backward, and compare.

    Where a forward leaves something for the next one, two micro-batches run too, as a pipeline does it: both forwards
    before the first backward.
    """
    recorder = _Recorder(program)
    try:
        (alone,) = _run(recorder, model, program, tensors, loss, 1)
    except RuntimeError as error:
        return Findings(frozenset(), {}, (f"running it fails: {' '.join(str(error).split())[:200]}",))
    dtypes = dict(recorder.dtypes)
    reached = frozenset(node for node in dtypes if node.name in recorder.reached)
    if program.spec != reference.spec:
        return Findings(frozenset(), {}, ("its output has another structure",))
    if reference.weightless:
        return Findings(reached, dtypes, ())
    found = differences(reference.alone, alone)
    if found or reference.pair is None:
        return Findings(reached, dtypes, tuple(found))
    found = _differences_in_turn(model, program, tensors, loss, reference.pair)
    return Findings(reached, dtypes, tuple(found), later=True)


def _differences_in_turn(
    model: nn.Module, program: Program, tensors: Sequence[torch.Tensor], loss: Loss | None, pair: Sequence[Outcome]
) -> list[str]:
    try:
        outcomes = _run(_Recorder(program), model, program, tensors, loss, len(pair))
    except RuntimeError as error:
        said = " ".join(str(error).split())[:200]
        return [f"a second micro-batch before the first one's backward fails: {said}"]
    compared = [differences(expected, outcome) for expected, outcome in zip(pair, outcomes, strict=True)]
    return [f"of two micro-batches, {said}" for found in compared for said in found]


def _run(
    recorder: _Recorder,
    model: nn.Module,
    program: Program,
    tensors: Sequence[torch.Tensor],
    loss: Loss | None,
    count: int,
) -> list[Outcome]:
    """The forwards of so many micro-batches, then their backwards."""
    with undisturbed(model, tensors) as given:
        passes = []
        for number, rows in enumerate((given, other_rows(given))[:count]):
            torch.manual_seed(SEED + number)
            leaves = _leaves(program, recorder.run(*_arguments(model, program, rows)))
            value, _ = scalar(leaves, loss, tree_unflatten(leaves, program.spec))
            passes.append((leaves, value, buffers_of(model)))
        return [finished(model, *each) for each in passes]


def _arguments(model: nn.Module, program: Program, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    left, named = iter(tensors), named_tensors(model)
    holders = [n for n in program.graph.nodes if n.op == "placeholder"]
    state = {n: named.get(known.name, known.tensor) for n, known in program.state.items()}
    return [state[n] if n in state else next(left) for n in holders]


def _leaves(program: Program, flat: Sequence[Any]) -> list[Any]:
    """The output's leaves, from the tensors that the graph returns."""
    left = iter(flat)
    return [next(left) if isinstance(output, fx.Node) else output for output in program.outputs]
