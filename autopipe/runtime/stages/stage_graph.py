"""What one stage computes: a function of what it receives, the model's inputs, and its parameters and buffers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autopipe.core.profile import Edge
from autopipe.runtime.capture import Captured
from autopipe.runtime.capture.demand import demand
from autopipe.runtime.capture.opaque import calls_in
from autopipe.runtime.capture.program import State, dtype_of, is_tensor, written
from autopipe.runtime.stages.deferred import WeightGradients
from autopipe.runtime.stages.graph_writer import Function, GraphWriter
from autopipe.runtime.stages.recomputation import is_repeatable


@dataclass(frozen=True)
class StageFunction:
    """A stage as a function of: the received tensors, the inputs, the state, in this order and all by position."""

    function: Function
    inputs: tuple[str, ...]
    state: tuple[State, ...]
    outputs: tuple[Edge, ...]


def stage_function(
    captured: Captured, start: int, stop: int, recompute: Collection[int], later: WeightGradients | None
) -> StageFunction:
    """The function of layers ``start`` to ``stop`` (excluded); ``later`` takes the weight gradients put off."""
    program, layout = captured.program, captured.layout
    outputs = _outputs(captured, stop)
    inside = [node for node, layer in layout.layer.items() if start <= layer < stop]
    effects = [node for node in inside if written(node) or calls_in(node)]
    needed = demand(program, layout, start, [*(node for node, _ in outputs), *effects])
    received = [layout.value[edge.name] for edge in (captured.crossing(start) if start else ())]
    inputs = [node for node in needed.sources if node in program.inputs]
    state = [node for node in needed.sources if node in program.state]
    writer = GraphWriter(program, layout, [*received, *inputs, *state], later)
    again = {n for n in range(start, stop) if n in recompute and is_repeatable(program, layout, n)}
    for layer, operations in _runs(captured, needed.operations, again):
        if layer in again:
            rest = {*needed.operations}.difference(operations)
            wanted = [n for n in operations if any(user in rest for user in n.users) or n in dict(outputs)]
            writer.add_recomputed(operations, wanted)
        else:
            writer.add(operations)
    last = stop == len(captured.layers)
    return StageFunction(
        function=writer.returning([node for node, _ in outputs], None if last else [edge for _, edge in outputs]),
        inputs=tuple(program.inputs[node] for node in inputs),
        state=tuple(program.state[node] for node in state),
        outputs=tuple(edge for _, edge in outputs),
    )


def _outputs(captured: Captured, stop: int) -> list[tuple[fx.Node, Edge]]:
    """What a stage returns: what the next one receives, or the flat outputs of the model."""
    if stop < len(captured.layers):
        return [(captured.layout.value[edge.name], edge) for edge in captured.crossing(stop)]
    return [(node, _output_edge(captured, node)) for node in captured.program.outputs if isinstance(node, fx.Node)]


def _output_edge(captured: Captured, node: fx.Node) -> Edge:
    """An output of the model as an edge, for its metadata; a size that depends on the data counts as 1."""
    last = len(captured.layers) - 1
    if not is_tensor(node):
        return Edge(node.name, last, (last,), (), "int64", False)
    shape = tuple(captured.program.dimension(size) or 1 for size in node.meta["val"].shape)
    return Edge(node.name, last, (last,), shape, dtype_of(node), node in captured.layout.gradients)


def _runs(captured: Captured, operations: Sequence[fx.Node], again: Collection[int]) -> list[tuple[int, list[fx.Node]]]:
    """The operations in runs of one layer each; −1 stands for free operations.

    Before a layer that is recomputed can be called, everything free that it reads must be there: it comes first.
    """
    layer = captured.layout.layer
    known = [(layer.get(node, -1), node) for node in operations]
    if again:
        known.sort()
    return [(number, [node for _, node in run]) for number, run in itertools.groupby(known, key=lambda item: item[0])]
