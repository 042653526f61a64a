"""The values of a stage's parameters and buffers without memory: from a checkpoint, or made as the model would.

Only what this rank's stages hold is made, one tensor at a time; the rest of the model stays without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from autopipe.core.errors import ModelError
from autopipe.runtime.capture.program import named_tensors
from autopipe.runtime.stages.initial import notes_of
from autopipe.runtime.stages.modules import StageModule
from autopipe.runtime.stages.shards import Shards


class Filling:
    """Gives the tensors of stages their values, each once.

    With a ``checkpoint`` all of them are read from it, those too that have values already; buffers that it lacks are
    made. ``model`` is the whole model.
    """

    def __init__(self, model: nn.Module, checkpoint: str | Path | None, device: torch.device) -> None:
        self._shards = Shards(checkpoint) if checkpoint is not None else None
        self._notes = notes_of(model)
        self._device = device
        self._known: dict[int, torch.Tensor] = {}
        self._names: dict[int, list[str]] = {}
        for name, tensor in named_tensors(model).items():
            self._known[id(tensor)] = tensor  # keeps the tensor, and so its number
            self._names.setdefault(id(tensor), []).append(name)
        self._saved = set(model.state_dict())
        self._made: dict[int, torch.Tensor] = {}

    def __call__(self, modules: Sequence[StageModule]) -> None:
        """Give all tensors of these stages their values. Raises ModelError that names one without a source."""
        for owner in (part for module in modules for part in module.modules()):
            for table in (owner._parameters, owner._buffers):
                for leaf, tensor in table.items():
                    if tensor is not None and id(tensor) in self._names:
                        table[leaf] = self._filled(tensor)  # type: ignore[assignment]

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        number = id(tensor)
        if number not in self._made:
            value = self._stored(self._names[number], tensor)
            if tensor.is_meta:
                value = self._noted(tensor) if value is None else value
                self._made[number] = self._placed(tensor, value)
            else:
                self._made[number] = tensor
                if value is not None:
                    with torch.no_grad():
                        tensor.copy_(value)
        return self._made[number]

    def _stored(self, names: Sequence[str], tensor: torch.Tensor) -> torch.Tensor | None:
        """The checkpoint's value, under any of the tensor's names; None where it need not have one."""
        if self._shards is None:
            return None
        name = next((name for name in names if name in self._shards), None)
        if name is None:
            if self._saved.isdisjoint(names):
                return None
            raise ModelError(f"the checkpoint lacks {names[0]}, which this rank's stages hold")
        value = self._shards[name]
        if value.shape != tensor.shape:
            raise ModelError(
                f"the checkpoint's {name} has shape {tuple(value.shape)}, the model's {tuple(tensor.shape)}"
            )
        return value

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._notes is not None and self._notes.knows(tensor):
            return self._notes.value(tensor)
        name = self._names[id(tensor)][0]
        raise ModelError(
            f"{name} is on the meta device and nothing says its value: build the model by "
            f"autopipe.without_weights(build_model)" + ("" if self._shards else ", or give checkpoint=…")
        )

    def _placed(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().to(self._device, tensor.dtype)
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
