"""Modules that torch.export cannot see through stay whole: one operation that calls the original module.

While exporting, the module's forward is replaced by the operation ``autopipe::opaque(call, tensors) -> tensors``;
which module and which other arguments it stands for is kept here, in a Call. Shapes come from real runs (calls.py).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopipe.runtime.capture.calls import CannotKeepWhole, Known, Made, known_calls
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.program import CHANGES, Program, argument, subgraphs
from autopipe.runtime.capture.rewriting import on_copies
from autopipe.runtime.capture.torch_private import TreeSpec, forward_hooks, tree_flatten, tree_leaves, tree_unflatten

_LIBRARY = torch.library.Library("autopipe", "FRAGMENT")
_LIBRARY.define("opaque(int call, Tensor[] tensors) -> Tensor[]")


@dataclass(eq=False)
class Call:
    """One call of an opaque module: what to pass to it beside tensors, what it returns, what was seen of it."""

    path: str
    module: nn.Module
    inputs: TreeSpec
    constants: list[Any]
    outputs: list[Any]
    batch: int
    known: Known

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the original module; its tensors, flat."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, _Tensor) else leaf for leaf in self.constants]
        args, kwargs = tree_unflatten(leaves, self.inputs)
        with on_copies(self.module, self.known.rewrites):
            made = self.module(*args, **kwargs)
        return [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]


class _Tensor:
    """Stands for a tensor among the other arguments of a call."""


CALLS: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
"""The calls that graphs name by number. A captured graph keeps its own alive, in the nodes' meta."""
_NUMBERS = itertools.count()
_CALL = "call"


def is_opaque(node: fx.Node) -> bool:
    """Whether an operation is the call of an opaque module."""
    return node.target is torch.ops.autopipe.opaque.default


def call_of(node: fx.Node) -> Call:
    """The call that an opaque operation stands for."""
    call: Call = node.meta[_CALL]
    return call


def calls_in(node: fx.Node) -> list[Call]:
    """The calls of opaque modules that an operation makes, those in its sub-graphs too."""
    if is_opaque(node):
        return [call_of(node)]
    inner = [n for graph in subgraphs(node) for n in graph.graph.nodes]
    return [n.target.__self__ for n in inner if isinstance(getattr(n.target, "__self__", None), Call)]


def attach_calls(program: Program) -> None:
    """Give each opaque operation its call, and say what it changes; in sub-graphs, put the call itself in its place.

    Must run before ``kept_whole`` ends.
    """
    for node in program.operations():
        if is_opaque(node):
            node.meta[_CALL] = CALLS[argument(node, 0)]
            node.meta[CHANGES] = call_of(node).known.changes
        for graph in subgraphs(node):
            for inner in graph.graph.nodes:
                if is_opaque(inner):
                    inner.target, inner.args = CALLS[inner.args[0]].run, (inner.args[1],)
            graph.recompile()


@torch.library.register_fake("autopipe::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    known = CALLS[call]
    batch = _batch(known, tensors)
    device = tensors[0].device if tensors else torch.device("cpu")
    return [
        torch.empty(
            [batch * n if g else n for n, g in zip(m.shape, m.grows, strict=True)], dtype=m.dtype, device=device
        )
        for m in known.outputs
        if isinstance(m, Made)
    ]


def _batch(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The micro-batch size, symbolic while exporting."""
    at = call.known.batch_at
    if at is None:
        return call.batch
    size = tensors[at.tensor].shape[at.dim]
    return size if at.factor == 1 else size // at.factor


@contextlib.contextmanager
def kept_whole(
    model: nn.Module, paths: Sequence[str], signature: Signature, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """While active, the modules at these paths appear as one operation each."""
    if not paths:
        yield
        return
    known = known_calls(model, paths, signature, tensors)
    made: list[Call] = []
    modules = [(path, model.get_submodule(path)) for path in paths]
    hooks = [(module, forward_hooks(module)) for _, module in modules]
    try:
        for path, module in modules:
            module.__dict__["forward"] = _stand_in(path, module, signature.batch, known[path], made)
            for name in forward_hooks(module):
                setattr(module, name, OrderedDict())
        yield
    finally:
        for module, tables in hooks:
            module.__dict__.pop("forward", None)
            for name, table in tables.items():
                setattr(module, name, table)


def _stand_in(path: str, module: nn.Module, batch: int, known: Sequence[Known], calls: list[Call]) -> Any:
    left = iter(known)

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        now = next(left)
        outputs, form = tree_flatten(now.output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [_Tensor() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for leaf in leaves:
            if not (
                leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str | torch.dtype | torch.device)
            ):
                raise CannotKeepWhole(path, f"is given a {type(leaf).__name__}, which may hold tensors")
        call, number = Call(path, module, spec, constants, outputs, batch, now), next(_NUMBERS)
        calls.append(call)
        CALLS[number] = call
        made = iter(torch.ops.autopipe.opaque(number, tensors))
        return tree_unflatten([next(made) if isinstance(leaf, Made) else leaf for leaf in outputs], form)

    return forward
