"""Stages: ranges of layers as modules that hold the model's own parameters under the model's own names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopipe.core.errors import ModelError, UsageError
from autopipe.core.profile import Edge
from autopipe.runtime.capture import Captured
from autopipe.runtime.capture.program import named_tensors
from autopipe.runtime.capture.torch_private import is_persistent, mark_not_persistent
from autopipe.runtime.stages.deferred import WeightGradients
from autopipe.runtime.stages.stage_graph import stage_function


class StageModule(nn.Module):
    """The layers ``start`` to ``stop`` (excluded) of a captured model.

    It holds the model's Parameters and buffers themselves, under the model's names: the keys of its ``state_dict``
    are those of the model. ``receives`` and ``sends`` are the values on the wire, in order.
    """

    def __init__(
        self,
        captured: Captured,
        index: int,
        start: int,
        stop: int,
        *,
        recompute: Collection[int] = (),
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.index, self.start, self.stop, self.deferred = index, start, stop, deferred
        self._micro_batch = captured.micro_batch
        self.receives: tuple[Edge, ...] = captured.crossing(start) if start else ()
        self.sends: tuple[Edge, ...] = captured.crossing(stop) if stop < len(captured.layers) else ()
        self._weight_gradients = WeightGradients()
        later = self._weight_gradients if deferred else None
        self._built = stage_function(captured, start, stop, recompute, later)
        for call in captured.whole(start, stop):
            _place(self, call.path, call.module)
        # the function gets its state through the tables that own it, so that load_state_dict and .to() are seen
        self._state = [_hold(self, captured.model, state.name, state.tensor) for state in self._built.state]
        names = {name for layer in range(start, stop) for name in captured.owned[layer]}
        for name, tensor in named_tensors(captured.model).items():
            if name in names:
                _hold(self, captured.model, name, tensor)
        self.training = captured.model.training

    def train(self, mode: bool = True) -> StageModule:
        """Refuse another mode than the captured one: dropout and normalisation are part of the graph."""
        if mode != self.training:
            is_now, wanted = ("train", "eval") if self.training else ("eval", "train")
            raise UsageError(f"stage {self.index} was captured in {is_now} mode: capture the model in {wanted} mode")
        return self

    def forward(self, /, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One micro-batch: from the received tensors and the model's inputs to what is sent, or the flat outputs.

        Raises ModelError when a tensor is missing; inputs that this stage does not read are ignored.
        """
        if len(received) != len(self.receives):
            raise ModelError(f"stage {self.index} receives {len(self.receives)} tensors, but got {len(received)}")
        try:
            given = [inputs[name] for name in self._built.inputs]
        except KeyError as missing:
            raise ModelError(f"stage {self.index} needs the model's input {missing}: pass all bound inputs") from None
        if self._micro_batch is not None:
            _check_rows(inputs, self._micro_batch)
        return self._built.function(*received, *given, *(table[name] for table, name in self._state))

    def input_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """Meta tensors like those it receives, for torch's static metadata."""
        return tuple(_meta(edge, micro_batch) for edge in self.receives)

    def output_args(self, micro_batch: int) -> tuple[torch.Tensor, ...]:
        """Meta tensors like those it returns, for torch's static metadata."""
        return tuple(_meta(edge, micro_batch) for edge in self._built.outputs)

    def weight_backward(self) -> Callable[[], None]:
        """Take the weight gradients that the last backward put off; calling the result accumulates them."""
        return self._weight_gradients.take()


def build_stages(
    captured: Captured,
    cuts: Sequence[int],
    *,
    only: Collection[int] | None = None,
    recompute: Collection[int] = (),
    deferred: bool = False,
) -> list[StageModule]:
    """The stages between cuts: ``cuts`` are the first layers of all stages but the first, ascending.

    ``only`` are the stages to build (all by default). ``recompute`` are the layers that keep only their inputs.
    ``deferred`` puts weight gradients off until ``weight_backward``. Raises UsageError for a cut that is not legal.
    """
    _check_cuts(captured, cuts)
    bounds = [0, *cuts, len(captured.layers)]
    again = {*recompute, *captured.checkpointed}
    return [
        StageModule(captured, index, start, stop, recompute=again, deferred=deferred)
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
        if only is None or index in only
    ]


def _check_cuts(captured: Captured, cuts: Sequence[int]) -> None:
    layers = len(captured.layers)
    if list(cuts) != sorted(set(cuts)) or any(not 0 < cut < layers for cut in cuts):
        raise UsageError(f"cuts {list(cuts)} must be ascending layer numbers from 1 to {layers - 1}")
    for cut in cuts:
        if cut in captured.layout.barred:
            name, reason = captured.layers[cut].name, captured.layout.barred[cut]
            raise UsageError(f"a stage cannot begin at layer {cut} ({name}): {reason}")


def _check_rows(inputs: Mapping[str, torch.Tensor], micro_batch: int) -> None:
    for name, tensor in inputs.items():
        if tensor.dim() and tensor.shape[0] != micro_batch:
            raise ModelError(
                f"input {name} has {tensor.shape[0]} rows, the model was captured for micro-batches of "
                f"{micro_batch} only"
            )


def _meta(edge: Edge, micro_batch: int) -> torch.Tensor:
    dtype = getattr(torch, edge.dtype)
    return torch.empty(edge.sizes(micro_batch), dtype=dtype, device="meta", requires_grad=edge.needs_gradient)


def _place(stage: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module that was kept whole at its own path, so that it moves, saves and loads with the stage."""
    *above, last = path.split(".")
    for part in above:
        stage = stage._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    stage._modules[last] = module


def _hold(stage: nn.Module, model: nn.Module, name: str, tensor: torch.Tensor) -> tuple[dict[str, Any], str]:
    """Register a tensor in the stage under its name in the model; the table that holds it, and its key there."""
    *path, leaf = name.split(".")
    owner = stage
    for part in path:
        # not add_module: a model may give a module the name of one of our attributes
        owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        owner._parameters[leaf] = tensor
        return owner._parameters, leaf
    owner._buffers[leaf] = tensor
    if not _is_saved(model, path, leaf):
        mark_not_persistent(owner, leaf)
    return owner._buffers, leaf


def _is_saved(model: nn.Module, path: Sequence[str], leaf: str) -> bool:
    """Whether a buffer is in the model's ``state_dict``; a constant of the graph is not."""
    try:
        owner = model.get_submodule(".".join(path))
    except AttributeError:
        return False
    return leaf in owner._buffers and is_persistent(owner, leaf)
