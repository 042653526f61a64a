"""Captured: a model as layers and edges, ready to be cut into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.core.errors import ModelError
from autopipe.core.profile import Edge, Layer, Tie
from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.inputs import Inputs, Signature
from autopipe.runtime.capture.opaque import Call, calls_in
from autopipe.runtime.capture.program import NORMS_WITH_STATISTICS, Program, storages, written
from autopipe.runtime.capture.torch_private import tree_unflatten


@dataclass(frozen=True)
class Captured:
    """A model as layers and edges.

    ``structure`` is the SHA-256 over operations, shapes, dtypes and layers. ``dtype`` is that of most parameters.
    ``micro_batch`` is None when any micro-batch size works, else the only one that does. ``notes`` are for the
    user, a line each. ``owned`` names, for each layer, the parameters and buffers that it holds, read or not.
    ``checkpointed`` are the layers whose recomputation the model itself asks for.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...]
    structure: str
    dtype: str
    micro_batch: int | None
    notes: tuple[str, ...]
    signature: Signature
    program: Program
    layout: Layout
    owned: tuple[tuple[str, ...], ...]
    checkpointed: frozenset[int] = frozenset()

    def bind(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """A batch as the keyword tensors that every stage takes. Raises ModelError when it does not fit.

        A batch of several micro-batches can be bound whole and split afterwards.
        """
        names = [leaf.name for leaf in self.signature.tensors]
        bound = dict(zip(names, self.signature.flatten(inputs), strict=True))
        rows = next(tensor.shape[0] for tensor in bound.values() if tensor.dim())
        if self.micro_batch is not None and rows % self.micro_batch:
            raise ModelError(
                f"the batch has {rows} rows, this model was captured for micro-batches of {self.micro_batch} only: "
                f"use a multiple, or capture it again with another example"
            )
        return bound

    def unflatten(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the model returns, from the last stage's flat outputs. Outputs that no loss reads may be None."""
        return tree_unflatten(self.output_leaves(outputs), self.program.spec)

    def output_leaves(self, outputs: Sequence[torch.Tensor]) -> list[Any]:
        """The leaves of what the model returns; see unflatten."""
        left = iter(outputs)
        return [self._leaf(leaf, left) for leaf in self.program.outputs]

    def growing_outputs(self) -> list[bool]:
        """For each leaf of what the model returns, whether its dimension 0 is the micro-batch."""
        return [isinstance(leaf, fx.Node) and self._grows(leaf) for leaf in self.program.outputs]

    def _grows(self, output: fx.Node) -> bool:
        value = output.meta["val"]
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        return self.program.dimension(value.shape[0]) == ("b" if self.micro_batch is None else self.micro_batch)

    def _leaf(self, leaf: Any, left: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        value = next(left)
        return value if isinstance(leaf.meta["val"], torch.Tensor) else value.item()

    def whole(self, start: int, stop: int) -> list[Call]:
        """The calls of modules that are kept whole in layers ``start`` to ``stop`` (excluded)."""
        return [call for node, n in self.layout.layer.items() if start <= n < stop for call in calls_in(node)]

    def changed_state(self) -> set[str]:
        """The names of the buffers and parameters that a forward may change: by an operation, or in a whole module."""
        changed = {
            state.name for node, state in self.program.state.items() if storages(node) & set(self.layout.changed)
        }
        whole = self.whole(0, len(self.layers))
        return changed | {f"{call.path}.{name}" for call in whole for name in call.known.rewrites}

    def carried(self, start: int, stop: int, *, met: bool = False) -> str:
        """Something that a forward of layers ``start`` to ``stop`` (excluded) leaves for the next; empty for nothing.

        It is a buffer, a parameter, or a plain attribute of a module that is kept whole. With ``met`` it changes what
        the next one gives: statistics that norms only keep, and counts that nothing reads, are left out.
        """
        inside = [node for node, n in self.layout.layer.items() if start <= n < stop]
        changed = {key for node in inside for arg in written(node) for key in storages(arg)}
        for node, state in self.program.state.items():
            if storages(node) & changed and not (met and self._only_kept(node)):
                return state.name
        left = [f"{call.path}.{name}" for call in self.whole(start, stop) for name in call.known.left_behind()]
        return left[0] if left else ""

    def _only_kept(self, state: fx.Node) -> bool:
        """Whether what touches a piece of the model's state gives nothing to others, norms apart."""
        key = storages(state)
        using = [n for n in self.layout.layer if any(storages(arg) & key for arg in n.all_input_nodes)]
        return all(n.target in NORMS_WITH_STATISTICS or not self.layout.layer.keys() & n.users.keys() for n in using)

    def crossing(self, cut: int) -> tuple[Edge, ...]:
        """The edges that a cut before layer ``cut`` sends on, relayed ones included, in the order on the wire."""
        return tuple(
            edge
            for edge in self.edges
            if edge.producer is not None and edge.producer < cut and any(c >= cut for c in edge.consumers)
        )


def dominating_dtype(model: nn.Module) -> str:
    """The dtype of most parameters, as ``float32``."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else "float32"
