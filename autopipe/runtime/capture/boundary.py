"""What crosses the cuts between layers, and which cuts are legal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from autopipe.core.profile import DTYPE_BYTES, Edge
from autopipe.runtime.capture.free import free_writers
from autopipe.runtime.capture.layers import Group
from autopipe.runtime.capture.opaque import Call, calls_in
from autopipe.runtime.capture.program import Program, dtype_of, is_tensor, is_view, storages, written


@dataclass(frozen=True)
class Layout:
    """Where everything is.

    ``layer`` is the number of the layer of each operation that is not free. ``free`` are the others, which every
    stage makes again; ``writers`` are, for each piece of memory that free operations change, those operations.
    ``sunk`` are views that whoever reads them makes again. ``gradients`` are the values that get a gradient.
    ``changed`` are the pieces of memory that any operation changes. ``value`` gives the node of an edge by its name;
    ``edges`` are in the order on the wire. ``barred`` are the cuts that are not legal, each with the reason.
    """

    layer: Mapping[fx.Node, int]
    free: Set[fx.Node]
    writers: Mapping[int, Sequence[fx.Node]]
    sunk: Set[fx.Node]
    gradients: Set[fx.Node]
    edges: tuple[Edge, ...]
    value: Mapping[str, fx.Node]
    barred: Mapping[int, str]
    changed: Set[int]


def lay_out(program: Program, groups: Sequence[Group], free: Set[fx.Node], gradients: Set[fx.Node]) -> Layout:
    """Edges and legal cuts of a program whose operations are grouped. ``gradients``: the values that get one."""
    layer = {node: number for number, group in enumerate(groups) for node in group.operations}
    sunk = {node for node in layer if _is_sunk(program, node, free)}
    readers = _readers(program, layer, sunk, len(groups))
    barred = _torn_memory(program, layer) | _torn_modules(program, layer)
    edges: dict[fx.Node, Edge] = {}
    for node in program.graph.nodes:
        consumers, producer = tuple(sorted(readers.get(node, ()))), layer.get(node)
        crosses = producer is not None and consumers and consumers[-1] > producer
        if node in sunk or not (crosses or (consumers and node in program.inputs)):
            continue
        problem = _problem(program, node)
        if not problem:
            edges[node] = _edge(program, node, producer, consumers, node in gradients)
        elif producer is not None:
            barred |= dict.fromkeys(range(producer + 1, consumers[-1] + 1), problem)
    value = {edge.name: node for node, edge in edges.items()}
    writers = free_writers(program, free)
    changed = {key for node in program.operations() for arg in written(node) for key in storages(arg)}
    return Layout(layer, free, writers, sunk, gradients, tuple(edges.values()), value, barred, changed)


def _is_sunk(program: Program, node: fx.Node, free: Set[fx.Node]) -> bool:
    """A view that is no smaller than its base, which is then what crosses."""
    if not is_view(node) or not isinstance(node.args[0], fx.Node):
        return False
    base = node.args[0]
    others = [n for n in node.all_input_nodes if n is not base and n not in free and not program.is_source(n)]
    if others or not is_tensor(base) or base in free or base in program.inputs:
        return False
    return _numel(base) <= _numel(node)


def _numel(node: fx.Node) -> int:
    """Elements, by the example's sizes."""
    total = 1
    for size in node.meta["val"].shape:
        total *= size if isinstance(size, int) else (size.node.hint or 1)
    return total


def _readers(
    program: Program, layer: Mapping[fx.Node, int], sunk: Set[fx.Node], layers: int
) -> dict[fx.Node, set[int]]:
    """For each value, the layers that need it, directly or through views and free operations.

    What the model returns is needed in the last layer.
    """
    readers: dict[fx.Node, set[int]] = {node: set() for node in program.graph.nodes}
    for node in program.outputs:
        if isinstance(node, fx.Node):
            readers[node].add(layers - 1)
    for node in reversed(program.operations()):
        needed = {layer[node]} if node in layer and node not in sunk else readers[node]
        for read in node.all_input_nodes:
            readers[read] |= needed
    return readers


def _problem(program: Program, node: fx.Node) -> str:
    """Why a value cannot be sent; empty when it can."""
    value, name = node.meta.get("val"), node.name
    if not isinstance(value, torch.Tensor):
        kind = "number" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else type(value).__name__
        return f"{name}, which crosses there, is a {kind}, not a tensor"
    if program.shape(node) is None:
        return f"the size of {name}, which crosses there, is not a multiple of the batch"
    dtype = dtype_of(node)
    if dtype not in DTYPE_BYTES or value.dtype.is_complex or value.layout is not torch.strided:
        return f"{name}, which crosses there, is {dtype}: only dense tensors of real numbers can be sent"
    return ""


def _edge(program: Program, node: fx.Node, producer: int | None, consumers: tuple[int, ...], gradient: bool) -> Edge:
    shape = program.shape(node) or ()
    name = program.inputs.get(node, node.name)
    return Edge(name, producer, consumers, shape, dtype_of(node), gradient)


def _torn_memory(program: Program, layer: Mapping[fx.Node, int]) -> dict[int, str]:
    """Cuts between an operation that changes memory in place and the others that use this memory."""
    writers: dict[int, list[fx.Node]] = {}
    users: dict[int, list[fx.Node]] = {}
    for node in layer:
        for key in {key for arg in written(node) for key in storages(arg)}:
            writers.setdefault(key, []).append(node)
        for key in {key for touched in (node, *node.all_input_nodes) for key in storages(touched)}:
            users.setdefault(key, []).append(node)
    kept = {key for node in (*program.state, *program.inputs) for key in storages(node)}
    barred: dict[int, str] = {}
    for key, changing in writers.items():
        last = max(layer[node] for node in (users[key] if key in kept else changing))
        first = min(layer[node] for node in users[key])
        barred |= dict.fromkeys(range(first + 1, last + 1), f"{changing[0].name} changes a tensor in place")
    return barred


def _torn_modules(program: Program, layer: Mapping[fx.Node, int]) -> dict[int, str]:
    """Cuts between a call of a module kept whole that leaves something for the next call, and what else uses that."""
    calls = [(number, call) for node, number in layer.items() for call in calls_in(node)]
    barred: dict[int, str] = {}
    for number, call in calls:
        for name in call.known.left_behind():
            using = [
                number,
                *(n for n, other in calls if _share(call, name, other)),
                *_readers_of(program, layer, call),
            ]
            changed = f"{call.path}.{name} changes in each forward"
            barred |= dict.fromkeys(range(min(using) + 1, max(using) + 1), changed)
    return barred


def _share(call: Call, name: str, other: Call) -> bool:
    """Whether another call meets what this one leaves: the same buffer, or an attribute of the same module."""
    if name in call.known.rewrites:
        buffer = call.module.get_buffer(name)
        return any(buffer is each for each in other.module.buffers())
    owner = call.module.get_submodule(name.rpartition(".")[0])
    return any(owner is each for each in other.module.modules())


def _readers_of(program: Program, layer: Mapping[fx.Node, int], call: Call) -> list[int]:
    """The layers of operations outside that use the buffers that a call changes."""
    changed = {id(call.module.get_buffer(name)) for name in call.known.rewrites}
    keys = {key for node, state in program.state.items() if id(state.tensor) in changed for key in storages(node)}
    return [n for node, n in layer.items() if any(storages(arg) & keys for arg in node.all_input_nodes)] if keys else []
