"""The exported model as one flat list of operations, and what each operation reads, writes and shares memory with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.runtime.capture.torch_private import (
    HigherOrderOperator,
    TreeSpec,
    is_data_dependent,
    storage_key,
    symbol,
    tree_leaves,
)

aten = torch.ops.aten
NORMS_WITH_STATISTICS: dict[Any, int] = {aten.batch_norm.default: 5, aten.instance_norm.default: 5}
"""Operations that update a running mean and variance (arguments 3 and 4), and where their flag for it is.

Their schema does not say that they write."""
UNSEEN_RANDOM = (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default)
"""Random only with their flag on; the tag of their schema does not know that."""


CHANGES = "changes"
"""In an opaque operation's meta: the positions of the tensors that it changes."""


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant of the model. ``kind`` is ``parameter``, ``buffer`` or ``constant``."""

    name: str
    tensor: torch.Tensor
    kind: str


@dataclass
class Program:
    """Operations in execution order: the call_function nodes of ``module.graph``.

    ``outputs`` are the flat leaves of the model's output: a node, or a constant. ``batch`` is the symbol of the
    micro-batch size, None when only the example's size is served.
    """

    module: fx.GraphModule
    state: dict[fx.Node, State]
    inputs: dict[fx.Node, str]
    outputs: list[Any]
    spec: TreeSpec
    batch: Any

    @property
    def graph(self) -> fx.Graph:
        """The graph that holds the nodes."""
        return self.module.graph

    def operations(self) -> list[fx.Node]:
        """All operations, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    def is_source(self, node: fx.Node) -> bool:
        """Whether a node is an input, a parameter, a buffer, a constant or a sub-graph, not an operation."""
        return node.op in ("placeholder", "get_attr")

    def shape(self, node: fx.Node) -> tuple[int | str, ...] | None:
        """A tensor's shape as an Edge holds it; None where a size is neither a number nor a multiple of the batch."""
        dims = [self.dimension(size) for size in node.meta["val"].shape]
        return None if None in dims else tuple(dim for dim in dims if dim is not None)

    def dimension(self, size: Any) -> int | str | None:
        """A size as an Edge holds it: ``4``, ``b``, ``128*b``; None for any other dependence."""
        if isinstance(size, int):
            return size
        if self.batch is None or is_data_dependent(size):
            return None
        factor = symbol(size) / self.batch
        if not (factor.is_Integer and factor > 0):
            return None
        return "b" if factor == 1 else f"{int(factor)}*b"


def values(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node stands for, as they were traced."""
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def argument(node: fx.Node, position: int) -> Any:
    """A positional argument, None where there are fewer; fx knows no narrower type."""
    return node.args[position] if position < len(node.args) else None


def is_tensor(node: fx.Node) -> bool:
    """Whether a node stands for one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def dtype_of(node: fx.Node) -> str:
    """A tensor's dtype when the graph ran, as ``float32``; that of the export before it did."""
    return str(node.meta.get("dtype", node.meta["val"].dtype)).removeprefix("torch.")


def storages(node: fx.Node) -> set[int]:
    """The pieces of memory that a node's tensors live in; equal numbers mean shared memory."""
    return {storage_key(value) for value in values(node)}


def state_storages(program: Program) -> set[int]:
    """The memory of the model's parameters, buffers and constants."""
    return {key for node in program.state for key in storages(node)}


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory an operation changes."""
    flag = NORMS_WITH_STATISTICS.get(node.target)
    if flag is not None:
        return [arg for arg in node.args[3:5] if isinstance(arg, fx.Node)] if node.args[flag] else []
    if CHANGES in node.meta:
        return [argument(node, 1)[position] for position in node.meta[CHANGES]]
    if isinstance(node.target, HigherOrderOperator):
        return list(_written_inside(node))
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found = [
        node.args[n] if n < len(node.args) else node.kwargs.get(argument.name)
        for n, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, fx.Node)]


def _written_inside(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that the sub-graphs of a higher-order operation change; their operands end its arguments."""
    for inner in subgraphs(node):
        holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        operands = [a for a in node.args[len(node.args) - len(holders) :] if isinstance(a, fx.Node)]
        outside = dict(zip(holders, operands, strict=False))
        keys = {key for n in inner.graph.nodes for arg in written(n) for key in storages(arg)}
        yield from (operand for holder, operand in outside.items() if storages(holder) & keys)


def subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """The sub-graphs that a higher-order operation runs."""
    owner = node.graph.owning_module
    named = [arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    found = [getattr(owner, str(arg.target), None) for arg in named]
    return [module for module in found if isinstance(module, fx.GraphModule)]


def is_random(node: fx.Node) -> bool:
    """Whether an operation draws random numbers."""
    target = node.target
    if target in UNSEEN_RANDOM:
        return bool(node.args[1]) and bool(node.args[2])
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if isinstance(target, HigherOrderOperator):
        return any(is_random(inner) for graph in subgraphs(node) for inner in graph.graph.nodes)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def has_sparse_gradient(node: fx.Node) -> bool:
    """Whether an operation is an embedding whose gradient is sparse."""
    return node.target is aten.embedding.default and bool(argument(node, 4))


def is_view(node: fx.Node) -> bool:
    """Whether an operation always gives a view of its first argument, and writes nothing."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not is_tensor(node):
        return False
    infos = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    return bool(infos) and not any(info.is_write for info in infos)


def path_of(node: fx.Node) -> list[str]:
    """The paths of the modules that an operation ran in, outermost first; a second call of a module ends in ``@1``."""
    return [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers by name, tied ones under each of their names."""
    parameters = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))
