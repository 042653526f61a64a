"""Modules that torch.export cannot see through stay whole: one operation that calls the original module.

While exporting, the module's forward is replaced by the operation ``autopipe::opaque(call, tensors) -> tensors``;
which module and which other arguments it stands for is kept here, in a Call. Shapes come from real runs at two
micro-batch sizes.
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

from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.observing import undisturbed
from autopipe.runtime.capture.program import CHANGES, Program, argument, subgraphs
from autopipe.runtime.capture.torch_private import TreeSpec, forward_hooks, tree_flatten, tree_leaves, tree_unflatten

_LIBRARY = torch.library.Library("autopipe", "FRAGMENT")
_LIBRARY.define("opaque(int call, Tensor[] tensors) -> Tensor[]")


@dataclass(frozen=True)
class Made:
    """A tensor that an opaque module returns: its sizes, those that grow with the micro-batch as a factor of it."""

    shape: tuple[int, ...]
    grows: tuple[bool, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BatchAt:
    """Where a call sees the micro-batch size: ``factor`` times it is size ``dim`` of its tensor ``tensor``."""

    tensor: int
    dim: int
    factor: int


@dataclass(eq=False)
class Call:
    """One call of an opaque module: what to pass to it beside tensors, and what it returns.

    ``changes`` are the positions of the tensors that it changes in place.
    """

    path: str
    module: nn.Module
    inputs: TreeSpec
    constants: list[Any]
    outputs: list[Any]
    batch: int
    batch_at: BatchAt | None
    changes: tuple[int, ...]

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the original module; its tensors, flat."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, _Tensor) else leaf for leaf in self.constants]
        args, kwargs = tree_unflatten(leaves, self.inputs)
        return [leaf for leaf in tree_leaves(self.module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


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
            node.meta[CHANGES] = call_of(node).changes
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
    if call.batch_at is None:
        return call.batch
    size = tensors[call.batch_at.tensor].shape[call.batch_at.dim]
    return size if call.batch_at.factor == 1 else size // call.batch_at.factor


@contextlib.contextmanager
def kept_whole(
    model: nn.Module, paths: Sequence[str], signature: Signature, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """While active, the modules at these paths appear as one operation each."""
    if not paths:
        yield
        return
    known = _known(model, paths, signature, tensors)
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


def _stand_in(path: str, module: nn.Module, batch: int, known: Sequence[_Known], calls: list[Call]) -> Any:
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
        call, number = Call(path, module, spec, constants, outputs, batch, now.batch_at, now.changes), next(_NUMBERS)
        calls.append(call)
        CALLS[number] = call
        made = iter(torch.ops.autopipe.opaque(number, tensors))
        return tree_unflatten([next(made) if isinstance(leaf, Made) else leaf for leaf in outputs], form)

    return forward


@dataclass(frozen=True)
class _Known:
    """What one call of a module returns, tensors replaced by Made."""

    output: Any
    batch_at: BatchAt | None
    changes: tuple[int, ...]


@dataclass(frozen=True)
class _Seen:
    """One call in one eager run: the shapes that it takes, what it returns, what it changes."""

    output: Any
    shapes: list[torch.Size]
    changes: tuple[int, ...]


@dataclass(frozen=True)
class _Call:
    """A call that is running: the tensors that it was given, their shapes and versions."""

    tensors: list[torch.Tensor]
    shapes: list[torch.Size]
    versions: list[int]

    def changes(self) -> tuple[int, ...]:
        """The positions of the tensors that have been changed since."""
        now = [tensor._version for tensor in self.tensors]
        return tuple(n for n, (before, after) in enumerate(zip(self.versions, now, strict=True)) if before != after)


class CannotKeepWhole(Exception):
    """A module that cannot be one operation; its parent may be."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path = path


def _known(
    model: nn.Module, paths: Sequence[str], signature: Signature, tensors: Sequence[torch.Tensor]
) -> dict[str, list[_Known]]:
    """For each path, its calls: compared between the example and twice the example."""
    small = _run(model, paths, signature, tensors)
    large = _run(model, paths, signature, [torch.cat([t, t]) if t.dim() else t for t in tensors])
    return {
        path: [_compare(path, a, b, signature.batch) for a, b in zip(small[path], large[path], strict=True)]
        for path in paths
    }


def _run(
    model: nn.Module, paths: Sequence[str], signature: Signature, tensors: Sequence[torch.Tensor]
) -> dict[str, list[_Seen]]:
    """For each path, its calls in one eager run; shapes are as they come."""
    found: dict[str, list[_Seen]] = {path: [] for path in paths}
    running: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        running.append(_Call(taken, [t.shape for t in taken], [t._version for t in taken]))

    def after(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = running.pop()
            found[path].append(_Seen(output, call.shapes, call.changes()))

        return note

    modules = [(path, model.get_submodule(path)) for path in paths]
    handles = [module.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for _, module in modules]
    handles += [module.register_forward_hook(after(path), with_kwargs=True) for path, module in modules]
    try:
        with undisturbed(model, tensors) as given:
            args, kwargs = signature.call_form(given)
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _compare(path: str, small: _Seen, large: _Seen, batch: int) -> _Known:
    growing = (
        BatchAt(n, dim, size // batch)
        for n, (before, after) in enumerate(zip(small.shapes, large.shapes, strict=True))
        for dim, size in enumerate(before)
        if after[dim] == 2 * size and size % batch == 0
    )
    leaves, form = tree_flatten(small.output)
    pairs = zip(leaves, tree_leaves(large.output), strict=True)
    made = [_made(path, a, b, batch) for a, b in pairs]
    return _Known(tree_unflatten(made, form), next(growing, None), small.changes)


def _made(path: str, small: Any, large: Any, batch: int) -> Any:
    """What an output leaf is in general, from what it is at two sizes."""
    if not isinstance(small, torch.Tensor):
        if small is None or isinstance(small, bool | int | float | str):
            return small
        raise CannotKeepWhole(path, f"returns a {type(small).__name__}, which is no tensor")
    grows = tuple(a != b for a, b in zip(small.shape, large.shape, strict=True))
    if any(grew and (b != 2 * a or a % batch) for a, b, grew in zip(small.shape, large.shape, grows, strict=True)):
        raise CannotKeepWhole(path, f"returns a size that depends on the data, here {tuple(small.shape)}")
    sizes = tuple(a // batch if g else a for a, g in zip(small.shape, grows, strict=True))
    return Made(sizes, grows, small.dtype)
