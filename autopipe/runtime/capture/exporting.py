"""From a module to a Program by torch.export: one graph for every micro-batch size where the model allows it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from autopipe.runtime.capture import attention
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.modes import write_out
from autopipe.runtime.capture.observing import flatten_output
from autopipe.runtime.capture.program import Program, State
from autopipe.runtime.capture.restoring import same_attributes
from autopipe.runtime.capture.torch_private import TreeSpec, inlined_checkpoints, symbol
from autopipe.runtime.capture.weightless import stood_in

_PREFIX = "model."
_COMPUTED = object()


class _Seen:
    """The form of the traced output. An object of a type of its own: torch.export puts lists and dicts back."""

    spec: TreeSpec
    constants: Sequence[Any]
    rebound: Sequence[str]


class _Flat(nn.Module):
    """The model between flat tensors and flat output leaves, so that no type of the user's needs to be known."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        self.model = model
        self.signature = signature
        self.seen = _Seen()

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """What a graph can hold of the output, tensors and numbers; then the buffers that were assigned to."""
        args, kwargs = self.signature.call_form(tensors)
        before = [(module, name, buffer) for module in self.model.modules() for name, buffer in module._buffers.items()]
        paths = {module: path for path, module in self.model.named_modules()}
        leaves, self.seen.spec = flatten_output(self.model(*args, **kwargs))
        self.seen.constants = [_constant(leaf) for leaf in leaves]
        rebound = [(module, name, old) for module, name, old in before if module._buffers[name] is not old]
        self.seen.rebound = [f"{paths[module]}.{name}".lstrip(".") for module, name, _ in rebound]
        assigned = [module._buffers[name] for module, name, _ in rebound]
        for module, name, old in rebound:
            module._buffers[name] = old
        return (*(leaf for leaf in leaves if _fits_graph(leaf)), *assigned)


def _fits_graph(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _constant(leaf: Any) -> Any:
    """What to return for a leaf that is no tensor. An object of an unknown type may hold traced tensors: None."""
    if _fits_graph(leaf):
        return _COMPUTED
    plain = isinstance(leaf, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return leaf if plain else None


def export_program(
    model: nn.Module, signature: Signature, tensors: Sequence[torch.Tensor], packed: Sequence[bool], *, dynamic: bool
) -> Program:
    """Export the model in its present mode. Whatever torch.export raises passes through."""
    flat = _Flat(model, signature)
    flat.training = model.training
    args = tuple(_at_least_two(t) for t in tensors) if dynamic else tuple(tensors)
    shapes = tuple({0: Dim("b", min=1)} if t.dim() else {} for t in args) if dynamic else None
    with attention.replayed(list(packed)), _plainly(model, args[0].device):
        exported = export(flat, args, strict=False, dynamic_shapes={"tensors": shapes} if shapes else None)
    return _program(exported, flat)


def _at_least_two(tensor: torch.Tensor) -> torch.Tensor:
    """A batch of one, repeated: torch.export takes a size of 1 for a constant."""
    return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == 1 else tensor


@contextlib.contextmanager
def _plainly(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Export what the model computes, without autocast around it, and leave the model as it was."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        for context in (
            inlined_checkpoints(),
            same_attributes(model),
            stood_in(model, device),
            warnings.catch_warnings(),
            _quiet(),
        ):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what torch.export prints off the user's terminal: whole graphs, beside the error that it raises anyway."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _program(exported: ExportedProgram, flat: _Flat) -> Program:
    module = exported.graph_module
    holders = [node for node in module.graph.nodes if node.op == "placeholder"]
    state: dict[fx.Node, State] = {}
    inputs: dict[fx.Node, str] = {}
    names = [leaf.name for leaf in flat.signature.tensors]
    for node, spec in zip(holders, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs[node] = names[len(inputs)]
        else:
            state[node] = _state(exported, flat.model, spec)
    write_out(module)
    _strip_prefix(module.graph)
    outputs = _outputs(exported, flat.seen, state)
    return Program(module, state, inputs, outputs, flat.seen.spec, _batch(inputs))


def _state(exported: ExportedProgram, model: nn.Module, spec: InputSpec) -> State:
    target = str(spec.target)
    name = target.removeprefix(_PREFIX)
    if spec.kind is InputKind.PARAMETER:
        return State(name, model.get_parameter(name), "parameter")
    if spec.kind is InputKind.BUFFER:
        return State(name, model.get_buffer(name), "buffer")
    constant = exported.constants[target]
    if not isinstance(constant, torch.Tensor):
        raise NotImplementedError(f"a constant of type {type(constant).__name__} in the graph ({name})")
    return State(name, constant, "constant")


def _outputs(exported: ExportedProgram, seen: _Seen, state: dict[fx.Node, State]) -> list[Any]:
    """The leaves of the output, with nodes in the place of what the graph computes."""
    specs = exported.graph_signature.output_specs
    (output,) = [node for node in exported.graph.nodes if node.op == "output"]
    computed = [arg for arg, spec in zip(output.args[0], specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
    left = iter(computed)
    leaves = [next(left) if leaf is _COMPUTED else leaf for leaf in seen.constants]
    buffers = {known.name: node for node, known in state.items()}
    for name, value in zip(seen.rebound, left, strict=True):
        _copy_into(exported.graph, buffers[name], value)
    return leaves


def _copy_into(graph: fx.Graph, buffer: fx.Node, value: fx.Node) -> None:
    """``self.buffer = value`` as a copy into the buffer, after everything that reads the old content."""
    order = {node: n for n, node in enumerate(graph.nodes)}
    readers = [node for node in buffer.users if node.op == "call_function"]
    with graph.inserting_after(max([value, *readers], key=lambda node: order[node])):
        copy = graph.call_function(torch.ops.aten.copy_.default, (buffer, value))
    with graph.inserting_before(copy):
        copy.args = (buffer, graph.call_function(torch.ops.aten.detach.default, (value,)))
    for node in (copy, copy.args[1]):
        node.meta = {**value.meta, "val": buffer.meta["val"] if node is copy else value.meta["val"]}


def _strip_prefix(graph: fx.Graph) -> None:
    """Module paths of the model, not of the wrapper around it."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            pairs = [(path, kind) for path, kind in stack.values() if str(path).startswith(_PREFIX)]
            node.meta["nn_module_stack"] = {str(path): (str(path).removeprefix(_PREFIX), kind) for path, kind in pairs}


def _batch(inputs: dict[fx.Node, str]) -> Any:
    for node in inputs:
        value = node.meta["val"]
        if value.dim() and not isinstance(value.shape[0], int):
            return symbol(value.shape[0])
    return None
