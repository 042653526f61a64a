"""Free operations: those that follow from the model's inputs and constant buffers alone.

Masks, positions, rotary tables. Each stage that needs one makes it again; none is ever sent.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from autopipe.runtime.capture.opaque import calls_in
from autopipe.runtime.capture.program import Program, argument, aten, is_random, storages, values, written

_COSTLY_READS = 64
"""Multiplications for each element of the result from which rebuilding a value is dearer than receiving it."""


def free_nodes(program: Program) -> set[fx.Node]:
    """The operations that every stage may repeat: no parameter, no random number, no changed buffer, little work."""
    operations = program.operations()
    shared = _written_state(program, operations)
    while True:
        free = _spread(program, operations, shared)
        binding = {
            key for node in operations if node not in free for arg in written(node) for key in storages(arg)
        } - shared
        if not binding:
            return free
        shared |= binding


def _written_state(program: Program, operations: list[fx.Node]) -> set[int]:
    kept = {key for node in (*program.state, *program.inputs) for key in storages(node)}
    return {key for node in operations for arg in written(node) for key in storages(arg)} & kept


def _spread(program: Program, operations: list[fx.Node], shared: set[int]) -> set[fx.Node]:
    """Free nodes when memory in ``shared`` is changed by operations that are not free."""
    free: set[fx.Node] = set()
    for node in operations:
        known = all(_is_known(program, arg, free) for arg in node.all_input_nodes)
        touches = any(storages(n) & shared for n in (node, *node.all_input_nodes))
        if known and not touches and not is_random(node) and not calls_in(node) and not is_costly(node):
            free.add(node)
    return free


def _is_known(program: Program, node: fx.Node, free: set[fx.Node]) -> bool:
    state = program.state.get(node)
    if state is not None:
        return state.kind != "parameter" and not state.tensor.requires_grad
    return node in free or program.is_source(node)


def is_costly(node: fx.Node) -> bool:
    """Whether an operation does much more arithmetic than its result has elements."""
    target: Any = node.target
    if "fft" in str(target):
        return True
    if target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default):
        weight = values(argument(node, 1))[0]
        return bool(weight[0].numel() > _COSTLY_READS)
    if target in (aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default, aten.addmm.default):
        left = values(argument(node, 1 if target is aten.addmm.default else 0))[0]
        length = left.shape[-1]
        return isinstance(length, torch.SymInt) or bool(length > _COSTLY_READS)
    return False


def free_writers(program: Program, free: Set[fx.Node]) -> dict[int, list[fx.Node]]:
    """For each piece of memory that free operations change, those operations: whoever needs one needs all."""
    found: dict[int, list[fx.Node]] = {}
    for node in program.operations():
        if node in free:
            for key in {key for arg in written(node) for key in storages(arg)}:
                found.setdefault(key, []).append(node)
    return found
