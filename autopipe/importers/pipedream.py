"""PipeDream's profiles: graph.txt, as its profiler writes them (Narayanan et al., SOSP 2019).

    node2 -- Conv2d(3, 64) -- forward_compute_time=2.1, backward_compute_time=2.8, activation_size=8.0, parameter_size=4
    <TAB>node2 -- node3

Times are milliseconds and sizes bytes of one mini-batch; an activation size may be a list ``[a; b]``, which is summed.
As in PipeDream's optimizer, nodes named Input… are no layers (their time is that of loading the data), and neither are
``__getitem__`` nodes whose value nobody reads.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.core.errors import FileError, UsageError
from autopipe.core.profile import DTYPE_BYTES, CostTable, Edge, Layer, LayerCost, Profile
from autopipe.core.units import parse_duration
from autopipe.importers.facts import Facts, shape_of

_NUMBER = r"([-+.\deE]+)"
_NODE = re.compile(
    rf"(\S+) -- (.*) -- forward_compute_time={_NUMBER}, backward_compute_time={_NUMBER}, "
    rf"activation_size=(\[.*\]|{_NUMBER}), parameter_size={_NUMBER}(?: -- stage_id=\d+)?\s*\Z"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)\s*\Z")
NOTES = (
    "the file has no bytes held for the backward: each layer's output counts as held",
    "the file has no time of the optimizer's step: it counts as 0",
)


@dataclass(frozen=True)
class Node:
    """A line of the file, in seconds and bytes."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int

    @property
    def label(self) -> str:
        """The name with what it is: ``node2.Conv2d``."""
        return f"{self.name}.{re.split('[(]', self.description)[0].strip() or 'layer'}"


def read(text: str, facts: Facts) -> Profile:
    """The Profile of a graph.txt. Raises FileError that names the line, UsageError for a fact that is missing."""
    nodes, edges = _parsed(text, facts.path)
    micro_batch, device = facts.needed_micro_batch(), facts.needed_device()
    edges = _without_loose_ends(nodes, edges)
    order = _in_order(nodes, edges, facts.path)
    layers = [nodes[name] for name in order]
    return Profile(
        model=facts.path.rpartition("/")[2].removesuffix(".txt"),
        layers=tuple(_layer(node, facts.dtype) for node in layers),
        edges=tuple(_edges(layers, edges, micro_batch, facts.dtype)),
        costs=(CostTable(micro_batch, tuple(map(_cost, layers))),),
        device=device,
        dtype=facts.dtype,
        origin="imported",
        sources=(f"PipeDream profile {facts.path.rpartition('/')[2]}",),
        notes=NOTES,
    )


def _parsed(text: str, path: str) -> tuple[dict[str, Node], list[tuple[str, str]]]:
    nodes: dict[str, Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if edge := _EDGE.match(line):
            edges.append((edge[1], edge[2]))
        elif node := _NODE.match(line):
            if node[1] in nodes:
                raise FileError(f"{where}: {node[1]} is there twice")
            nodes[node[1]] = _node(node, where)
        else:
            raise FileError(f"{where} is neither a node nor an edge of a PipeDream graph: {line.strip()[:60]!r}")
    if missing := next((name for edge in edges for name in edge if name not in nodes), None):
        raise FileError(f"{path}: an edge names {missing}, which is no node of it")
    if not nodes:
        raise FileError(f"{path} has no nodes: is it a PipeDream graph.txt?")
    return nodes, edges


def _node(found: re.Match[str], where: str) -> Node:
    try:
        sizes = [float(size) for size in found[5].strip("[]").split(";")]
        numbers = [parse_duration(f"{found[3]} ms"), parse_duration(f"{found[4]} ms"), sum(sizes), float(found[7])]
        if min(numbers) < 0:
            raise ValueError
    except (ValueError, UsageError):
        raise FileError(f"{where}: {found[1]} has a figure that is negative or no number") from None
    forward_s, backward_s, activation, parameters = numbers
    return Node(found[1], found[2], forward_s, backward_s, round(activation), round(parameters))


def _without_loose_ends(nodes: dict[str, Node], edges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Drop the inputs and the values that nobody reads from ``nodes``; the edges that are left."""
    fed, read_ = {consumer for _, consumer in edges}, {producer for producer, _ in edges}
    for name, node in list(nodes.items()):
        source = name not in fed and node.description.startswith("Input")
        unread = name not in read_ and node.description.startswith("__getitem__")
        if source or unread:
            del nodes[name]
    return [edge for edge in edges if edge[0] in nodes and edge[1] in nodes]


def _in_order(nodes: Mapping[str, Node], edges: Sequence[tuple[str, str]], path: str) -> list[str]:
    """The names so that values are made before they are read; of those that are ready the lowest number first."""
    waiting = {name: sum(consumer == name for _, consumer in edges) for name in nodes}
    ready = [(_number(name), name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for producer, consumer in edges:
            if producer == name:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(ready, (_number(consumer), consumer))
    if len(order) < len(nodes):
        raise FileError(f"{path}: the edges of {next(n for n in nodes if n not in order)} go round in a circle")
    return order


def _number(name: str) -> int:
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else 0


def _layer(node: Node, dtype: str) -> Layer:
    """A layer whose backward cannot be split: the file has the time of the whole only."""
    parameters = node.parameter_bytes // DTYPE_BYTES[dtype]
    return Layer(node.label, node.parameter_bytes, parameters, can_split_backward=False)


def _cost(node: Node) -> LayerCost:
    return LayerCost(
        forward_s=node.forward_s,
        backward_s=node.backward_s,
        input_grad_s=node.backward_s,
        weight_grad_s=0.0,
        held_after_forward_bytes=node.activation_bytes,
        held_after_input_grad_bytes=0,
        output_bytes=node.activation_bytes,
    )


def _edges(layers: Sequence[Node], edges: Sequence[tuple[str, str]], micro_batch: int, dtype: str) -> list[Edge]:
    place = {node.name: index for index, node in enumerate(layers)}
    readers: dict[int, set[int]] = {}
    for producer, consumer in edges:
        readers.setdefault(place[producer], set()).add(place[consumer])
    found = []
    for index, consumers in sorted(readers.items()):
        node = layers[index]
        shape = shape_of({micro_batch: node.activation_bytes}, dtype)
        assert shape is not None  # one size can always be had as bytes
        found.append(Edge(node.label, index, tuple(sorted(consumers)), *shape))
    return found
