"""``torch.no_grad`` and ``torch.autocast`` inside a forward, as a property of each operation.

torch.export wraps what runs under them into one operation with a sub-graph. A whole backbone may be in there, so
the sub-graphs are written out again, and each operation carries the modes that it runs under, outermost first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_MODES = "modes"


@dataclass(frozen=True)
class Mode:
    """A mode and its arguments: ``enter()`` gives the open context."""

    context: Callable[..., contextlib.AbstractContextManager[Any]]
    arguments: tuple[Any, ...]

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        """Open the mode."""
        opened = self.context(*self.arguments)
        opened.__enter__()
        return opened


def modes_of(node: fx.Node) -> tuple[Mode, ...]:
    """The modes that an operation runs under, outermost first."""
    found: tuple[Mode, ...] = node.meta.get(_MODES, ())
    return found


@contextlib.contextmanager
def under(modes: tuple[Mode, ...]) -> Iterator[None]:
    """Run under modes."""
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.push(mode.enter())
        yield


def write_out(module: fx.GraphModule) -> None:
    """Replace every wrapped sub-graph by its operations."""
    while True:
        wrapped = [(node, _wraps(node)) for node in module.graph.nodes]
        if not any(found for _, found in wrapped):
            break
        for node, found in wrapped:
            if found:
                _splice(module, node, *found)


def _wraps(node: fx.Node) -> tuple[Mode, int] | None:
    """The mode of a wrapping operation, and at which argument its sub-graph is."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return Mode(torch.set_grad_enabled, node.args[:1]), 1
    if node.target is torch.ops.higher_order.wrap_with_autocast:
        return Mode(_autocast, node.args[:4]), 4
    return None


def _autocast(device: str, dtype: torch.dtype | None, enabled: bool, cached: bool | None) -> torch.autocast:
    return torch.autocast(device, dtype, enabled, cached)


def _splice(module: fx.GraphModule, node: fx.Node, mode: Mode, position: int) -> None:
    holder, *operands = node.args[position:]
    name = str(holder.target)  # type: ignore[union-attr]
    inner: fx.GraphModule = getattr(module, name)
    holders = [n for n in inner.graph.nodes if n.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(holders, operands, strict=True))
    outer = (*modes_of(node), mode)
    with module.graph.inserting_before(node):
        for part in inner.graph.nodes:
            if part.op == "get_attr":
                setattr(module, f"{name}_{part.target}", getattr(inner, str(part.target)))
                known[part] = module.graph.get_attr(f"{name}_{part.target}")
            elif part.op == "call_function":
                known[part] = module.graph.node_copy(part, known.__getitem__)
                known[part].meta[_MODES] = (*outer, *modes_of(part))
            elif part.op == "output":
                _replace(module.graph, node, fx.map_arg(part.args[0], known.__getitem__))


def _replace(graph: fx.Graph, node: fx.Node, results: Any) -> None:
    """Put the results of a sub-graph in the place of what was read from the wrapping operation."""
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # a getitem
        graph.erase_node(user)
    graph.erase_node(node)


class ModeStack:
    """The open modes of a running graph. Operations of the graph open and close them; an error closes them all."""

    def __init__(self) -> None:
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def entering(self, mode: Mode) -> Callable[[], None]:
        """A function that opens one more mode."""

        def enter() -> None:
            self._open.append(mode.enter())

        return enter

    def leave(self) -> None:
        """Close the innermost mode."""
        self._open.pop().__exit__(None, None, None)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, closing what it left open when it fails."""

        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            finally:
                while self._open:
                    self.leave()

        return guarded
