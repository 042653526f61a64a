"""Simplify a Program without changing what it computes: no asserts, no identities, no in-place operations on private
values, sizes from the inputs, nothing that the outputs do not need."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopipe.runtime.capture.program import (
    NORMS_WITH_STATISTICS,
    Program,
    argument,
    aten,
    is_random,
    is_tensor,
    is_view,
    state_storages,
    storages,
    values,
    written,
)
from autopipe.runtime.capture.torch_private import OpOverload, storage_key

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.contiguous.default)
_DROPOUTS = (aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, aten.alpha_dropout.default)
_SIZES = (aten.sym_size.int, aten.sym_size.default)
_NOT_FUNCTIONAL = frozenset({"copy", "set", "resize", "resize_as", "as_strided", "swap"})
"""In-place operations whose counterpart of the same name is another operation, or has no gradient."""


def clean(program: Program) -> None:
    """All simplifications, in place."""
    _drop_asserts(program)
    _merge_ties(program)
    _drop_identities(program)
    _rebuild_sizes(program)
    _make_functional(program)
    _copy_changing_state(program)


def return_outputs(program: Program) -> None:
    """Make the graph return the program's outputs and nothing else."""
    for output in [node for node in program.graph.nodes if node.op == "output"]:
        program.graph.erase_node(output)
    program.graph.output(tuple(output for output in program.outputs if isinstance(output, fx.Node)))


def drop_dead(program: Program) -> None:
    """Erase every operation that neither the outputs nor the model's state depends on."""
    live = live_nodes(program, program.outputs)
    for node in reversed(list(program.graph.nodes)):
        if node.op not in ("placeholder", "output") and node not in live:
            program.graph.erase_node(node)


def live_nodes(program: Program, needed: Iterable[Any]) -> set[fx.Node]:
    """The nodes that the needed ones depend on, and those that change the model's buffers."""
    operations = program.operations()
    writers = {node: {key for arg in written(node) for key in storages(arg)} for node in operations if written(node)}
    kept = state_storages(program)
    live: set[fx.Node] = set()
    waiting = [node for node in needed if isinstance(node, fx.Node)]
    waiting += [node for node in operations if writers.get(node, set()) & kept]
    while waiting:
        while waiting:
            node = waiting.pop()
            if node not in live:
                live.add(node)
                waiting += node.all_input_nodes
        touched = {key for node in live for key in storages(node)}
        waiting = [node for node, keys in writers.items() if node not in live and keys & touched]
    return live


def _drop_asserts(program: Program) -> None:
    for node in reversed(program.operations()):
        name = str(node.target)
        if not node.users and ("assert" in name or "sym_constrain_range" in name):
            program.graph.erase_node(node)


def _merge_ties(program: Program) -> None:
    """One placeholder for each tensor: a parameter under two names is the same parameter."""
    first: dict[int, fx.Node] = {}
    for node, state in list(program.state.items()):
        kept = first.setdefault(id(state.tensor), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            del program.state[node]
            program.graph.erase_node(node)


def _drop_identities(program: Program) -> None:
    """Without this, one tensor would cross a cut twice under two names."""
    operations = program.operations()
    changed = {key for node in operations for arg in written(node) for key in storages(arg)}
    for node in operations:
        if _is_identity(node) and not (node.target is aten.cat.default and storages(node) & changed):
            _replace(program, node, _longest(node))
            program.graph.erase_node(node)


def _is_identity(node: fx.Node) -> bool:
    if node.target is aten.cat.default:
        return _adds_nothing(node)
    if node.target in _DROPOUTS:
        return not node.args[1] or not node.args[2]
    if node.target not in _CASTS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = argument(node, 0).meta["val"], node.meta["val"]
    if storage_key(before) != storage_key(after):
        return False
    same = before.dtype == after.dtype and before.device == after.device and before.stride() == after.stride()
    return bool(same)


def _adds_nothing(node: fx.Node) -> bool:
    """Whether only one of the joined tensors has elements, as in the first use of a key-value cache."""
    parts = [part.meta["val"] for part in argument(node, 0)]
    full = [part for part in parts if not any(isinstance(size, int) and size == 0 for size in part.shape)]
    return len(full) == 1 and full[0].dtype == node.meta["val"].dtype and len(parts) > 1


def _longest(node: fx.Node) -> fx.Node:
    """What an identity gives back."""
    given = argument(node, 0)
    parts: list[fx.Node] = [given] if isinstance(given, fx.Node) else list(given)
    return max(parts, key=lambda part: 0 not in part.meta["val"].shape)


def _replace(program: Program, old: fx.Node, new: Any) -> None:
    old.replace_all_uses_with(new)
    program.outputs = [new if output is old else output for output in program.outputs]


def _rebuild_sizes(program: Program) -> None:
    """Read the batch size off an input: a number cannot cross a cut, but every stage has the inputs."""
    source = next((n for n in program.inputs if is_tensor(n) and n.meta["val"].dim()), None)
    if program.batch is None or source is None:
        return
    last = [node for node in program.graph.nodes if node.op == "placeholder"][-1]
    with program.graph.inserting_after(last):
        batch = program.graph.call_function(aten.sym_size.int, (source, 0))
    batch.meta["val"] = source.meta["val"].shape[0]
    for node in program.operations():
        if node is not batch and node.target in _SIZES:
            _from_batch(program, node, batch)
    if not batch.users:
        program.graph.erase_node(batch)


def _from_batch(program: Program, node: fx.Node, batch: fx.Node) -> None:
    size = node.meta["val"]
    dim = program.dimension(size) if isinstance(size, int | torch.SymInt) else None
    if not isinstance(dim, str):
        return
    new: Any = batch
    if dim != "b":
        with program.graph.inserting_after(batch):
            new = program.graph.call_function(operator.mul, (batch, int(dim.removesuffix("*b"))))
        new.meta["val"] = size
    _replace(program, node, new)
    program.graph.erase_node(node)


def _make_functional(program: Program) -> None:
    """``relu_`` becomes ``relu`` where nobody else reads the memory that it would overwrite."""
    order = {node: n for n, node in enumerate(program.graph.nodes)}
    kept = {key for node in (*program.state, *program.inputs) for key in storages(node)}
    members: dict[int, list[fx.Node]] = {}
    for node in order:
        for key in storages(node):
            members.setdefault(key, []).append(node)
    for node in program.operations():
        target = _functional(node)
        base = node.args[0] if node.args else None
        if target is None or not isinstance(base, fx.Node) or storages(base) & kept:
            continue
        others = {n for key in storages(base) for n in members[key]} - {base, node}
        if any(order[user] > order[node] for other in others if order[other] < order[node] for user in other.users):
            continue
        if any(output in others for output in program.outputs if isinstance(output, fx.Node)):
            continue
        _swap_in(program, node, base, target, order)


def _functional(node: fx.Node) -> Any:
    """The counterpart that writes nothing, if there is one with the same result."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.partition("::")[2]
    if not name.endswith("_") or name.endswith("__") or written(node) != [node.args[0]]:
        return None
    if name[:-1] in _NOT_FUNCTIONAL or (is_random(node) and "dropout" not in name):
        return None
    base = argument(node, 0).meta["val"]
    if any(v.dtype != base.dtype for arg in node.all_input_nodes for v in values(arg)):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _swap_in(program: Program, node: fx.Node, base: fx.Node, target: Any, order: dict[fx.Node, int]) -> None:
    node.target = target
    later = [user for user in base.users if user is not node and order[user] > order[node]]
    for user in later:
        user.replace_input_with(base, node)
    program.outputs = [node if output is base else output for output in program.outputs]


def _copy_changing_state(program: Program) -> None:
    """Read a copy of a buffer that the model changes: the next micro-batch changes it before this one's backward."""
    kept = state_storages(program)
    operations = program.operations()
    changed = {key for node in operations for arg in written(node) for key in storages(arg)} & kept
    for node in operations:
        if written(node) or node.target in NORMS_WITH_STATISTICS or node.target is operator.getitem or is_view(node):
            continue
        for read in node.all_input_nodes:
            if storages(read) & changed:
                with program.graph.inserting_before(node):
                    copy = program.graph.call_function(aten.clone.default, (read,))
                copy.meta = {**node.meta, "val": read.meta["val"].clone()}
                node.replace_input_with(read, copy)
