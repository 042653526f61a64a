"""Writes operations of a program into a new fx graph, which becomes Python code that runs at eager speed."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx, nn

from autopipe.core.profile import Edge
from autopipe.runtime.capture.boundary import Layout
from autopipe.runtime.capture.modes import Mode, ModeStack, modes_of
from autopipe.runtime.capture.opaque import call_of, calls_in, is_opaque
from autopipe.runtime.capture.program import Program, State, is_random, is_tensor, state_storages, storages, written
from autopipe.runtime.capture.torch_private import gradient_hooks
from autopipe.runtime.stages.deferred import WeightGradients
from autopipe.runtime.stages.recomputation import Function, recomputed

__all__ = ["Function", "GraphWriter"]


class GraphWriter:
    """An fx graph in the making: placeholders for given values, then operations, then what it returns."""

    def __init__(
        self, program: Program, layout: Layout, given: Sequence[fx.Node], later: WeightGradients | None
    ) -> None:
        self._program, self._layout, self._later = program, layout, later
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._stack = ModeStack()
        self._modes: tuple[Mode, ...] = ()
        self._guarded = False
        self._known = {node: self._graph.placeholder(node.name) for node in given}

    def add(self, operations: Sequence[fx.Node]) -> None:
        """Write operations, in order, each under its modes."""
        for node in operations:
            # without a parameter there is no gradient that no_grad could hold back
            free = node in self._layout.free
            self._switch(tuple(m for m in modes_of(node) if not free or m.context is not torch.set_grad_enabled))
            self._known[node] = self._operation(node)

    def _operation(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        if is_opaque(node):
            return self._graph.call_function(call_of(node).run, (args[1],))
        target = self._putting_off(node) or node.target
        return self._graph.call_function(target, args, kwargs)  # type: ignore[arg-type]

    def _argument(self, node: fx.Node) -> fx.Node:
        if node.op != "get_attr":
            return self._known[node]
        name = str(node.target)
        setattr(self._root, name, getattr(self._program.module, name))
        return self._graph.get_attr(name)

    def _putting_off(self, node: fx.Node) -> Callable[..., torch.Tensor] | None:
        """The counterpart that puts its weight gradients off, where weight and bias are parameters."""
        found = self._later.counterpart(node.target) if self._later is not None else None
        if found is None or node not in self._layout.gradients:
            return None
        function, *positions = found
        weights = [node.args[n] for n in positions if n < len(node.args) and node.args[n] is not None]
        state = [self._program.state.get(arg) for arg in weights if isinstance(arg, fx.Node)]
        return function if len(state) == len(weights) and all(map(_can_wait, state)) else None

    def _switch(self, modes: tuple[Mode, ...]) -> None:
        """Leave the modes of the operation before and enter those of the next, as far as they differ."""
        pairs = zip(self._modes, modes, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for _ in self._modes[same:]:
            self._graph.call_function(self._stack.leave)
        for mode in modes[same:]:
            self._graph.call_function(self._stack.entering(mode))
        self._guarded |= bool(modes)
        self._modes = modes

    def add_recomputed(self, operations: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> None:
        """Write the operations of one layer as one call that keeps only what it is given."""
        inside = set(operations)
        read = dict.fromkeys(arg for node in operations for arg in node.all_input_nodes)
        given = [arg for arg in read if arg not in inside and arg.op != "get_attr"]
        inner = GraphWriter(self._program, self._layout, given, self._later)
        inner.add(operations)
        changed = {key for node in operations for arg in written(node) for key in storages(arg)}
        changed &= state_storages(self._program)
        buffers = [n for n, arg in enumerate(given) if storages(arg) & changed]
        random = any(is_random(node) or calls_in(node) for node in operations)
        self._switch(())
        call = recomputed(inner.returning(wanted, ()), buffers, random)
        made = self._graph.call_function(call, tuple(self._known[node] for node in given))
        for n, node in enumerate(wanted):
            self._known[node] = self._graph.call_function(operator.getitem, (made, n))

    def returning(self, results: Sequence[fx.Node], sent: Collection[Edge] | None) -> Function:
        """The graph as a function.

        ``sent``: the edges of the results when they go on the wire, empty when they stay in the stage, None when
        they are the model's outputs.
        """
        self._switch(())
        if sent is None:
            values = [self._output(node) for node in results]
        elif sent:
            values = [self._sent(node, edge) for node, edge in zip(results, sent, strict=True)]
        else:
            values = [self._known[node] for node in results]
        self._graph.output(tuple(values))
        made: Function = fx.GraphModule(self._root, self._graph).forward
        return self._stack.guard(made) if self._guarded else made

    def _sent(self, node: fx.Node, edge: Edge) -> fx.Node:
        """What goes on the wire: dense, and without a gradient where the edge has none."""
        value = self._known[node]
        if not edge.needs_gradient:
            value = self._graph.call_function(torch.Tensor.detach, (value,))
        return self._graph.call_function(torch.Tensor.contiguous, (value,))

    def _output(self, node: fx.Node) -> fx.Node:
        """What the last stage returns: a number as a tensor, a parameter as a view, for the runtime detaches it."""
        value = self._known[node]
        if not is_tensor(node):
            return self._graph.call_function(torch.tensor, (value,))
        if node in self._program.state:
            return self._graph.call_function(torch.ops.aten.alias.default, (value,))
        return value


def _can_wait(state: State | None) -> bool:
    """Whether a tensor is a parameter whose gradient nobody is waiting for."""
    if state is None or state.kind != "parameter" or not state.tensor.requires_grad:
        return False
    return not gradient_hooks(state.tensor)
