"""What a range of layers must run: its own operations, the views and free operations that they need, and its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.program import Program, storages


@dataclass(frozen=True)
class Demand:
    """The operations to run, in order; the inputs, parameters and buffers they read; the values from layers before."""

    operations: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    received: tuple[fx.Node, ...]


def demand(program: Program, layout: Layout, start: int, targets: Iterable[fx.Node]) -> Demand:
    """What layers from ``start`` on must run to have the target nodes."""
    run: set[fx.Node] = set()
    sources: set[fx.Node] = set()
    received: set[fx.Node] = set()
    waiting = list(targets)
    while waiting:
        node = waiting.pop()
        if node in run or node in sources or node in received:
            continue
        if program.is_source(node):
            sources.add(node)
        elif layout.layer.get(node, start) < start and node not in layout.sunk:
            received.add(node)
        else:
            run.add(node)
            waiting += node.all_input_nodes
            if layout.writers and node in layout.free:
                waiting += [writer for key in storages(node) for writer in layout.writers.get(key, ())]
    operations, given, before = (tuple(sorted(chosen)) for chosen in (run, sources, received))
    return Demand(operations, given, before)
