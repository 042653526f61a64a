"""Structural hashes: equal for layers with equal operations, shapes, dtypes and gradient flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopipe.core.profile import content_digest
from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.opaque import call_of, is_opaque
from autopipe.runtime.capture.program import Program, subgraphs
from autopipe.runtime.capture.torch_private import tree_map


def structure(program: Program, layout: Layout, operations: Sequence[fx.Node]) -> str:
    """SHA-256 of operations and of what they read from outside, named by order of appearance."""
    number: dict[fx.Node, int] = {}
    lines: list[Any] = []

    def name(node: fx.Node) -> _Shown:
        if node not in number:
            number[node] = len(number)
            lines.append(["given", _source(program, layout, node), _described(program, layout, node)])
        return _Shown(f"%{number[node]}")

    for node in operations:
        args = node.args[1:] if is_opaque(node) else node.args  # the number of a call says nothing
        arguments = str(fx.map_arg((args, node.kwargs), name))
        number[node] = len(number)
        lines.append(["made", _target(node), arguments, _described(program, layout, node)])
    return content_digest(lines)


def _source(program: Program, layout: Layout, node: fx.Node) -> str:
    state = program.state.get(node)
    if state is not None:
        return f"{state.kind}{' trained' if state.tensor.requires_grad else ''}"
    return "input" if node in program.inputs else "free" if node in layout.free else "value"


def _described(program: Program, layout: Layout, node: fx.Node) -> Any:
    def leaf(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes, strides = ([_size(program, n) for n in numbers] for numbers in (value.shape, value.stride()))
            return f"{value.dtype}{sizes}{strides}"
        return _size(program, value)

    return [str(tree_map(leaf, node.meta.get("val"))), node in layout.gradients]


def _size(program: Program, value: Any) -> str:
    if isinstance(value, torch.SymInt):
        return str(program.dimension(value) or "?")
    return str(value)


def _target(node: fx.Node) -> str:
    if is_opaque(node):
        module = call_of(node).module
        return f"opaque {type(module).__module__}.{type(module).__qualname__} {module}"
    inner = [[str(n.target) for n in graph.graph.nodes if n.op == "call_function"] for graph in subgraphs(node)]
    return f"{node.target} {inner}" if inner else str(node.target)


class _Shown(str):
    """Text that prints without quotes inside containers."""

    __repr__ = str.__str__
