"""Versions of a stage's weights: tensors that are given to its module in place of its parameters.

A version's tensors share the memory of the parameters until the optimizer is to change those while the version is still
needed: then the parameters get new memory first. So no tensor that a backward will read is ever changed, every version
is there once, and the newest one is the parameters themselves, which the optimizer and its state belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

import torch
from torch import nn

Version = dict[str, torch.Tensor]


class ByName(Protocol):
    """Weights by name."""

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """The weight of that name."""


class Versions:
    """The versions of one module's weights that are needed, by number. ``newest`` is the parameters' own."""

    def __init__(self, module: nn.Module, newest: int = 0) -> None:
        self.parameters = dict(module.named_parameters())
        self.newest = newest
        self._kept: dict[int, Version] = {newest: self._leaves()}

    def __getitem__(self, number: int) -> Version:
        return self._kept[number]

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of the versions that are held."""
        return tuple(sorted(self._kept))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of all versions."""
        return [tensor for version in self._kept.values() for tensor in version.values()]

    def gather(self, number: int) -> None:
        """Add the gradients that a backward left in a version to those of the parameters."""
        for name, leaf in self._kept[number].items():
            if leaf.grad is not None:
                parameter = self.parameters[name]
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)
                leaf.grad = None

    def update(self, step: Callable[[], None], needed: Collection[int]) -> None:
        """Let the optimizer make the next version; of the older ones only those that are needed stay."""
        self._kept = {number: version for number, version in self._kept.items() if number in needed}
        if self.newest in needed:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        step()
        self.newest += 1
        self._kept[self.newest] = self._leaves()

    def _leaves(self) -> Version:
        """The parameters' values as tensors of their own, for autograd to collect gradients in."""
        return {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}


class _View(NamedTuple):
    """A weight, or a view of one, that a backward will read."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Newest(Versions):
    """One version only: whatever is asked for, the parameters as they are now.

    A forward keeps no weight: what autograd would save of one is noted by name, and is looked up when the backward
    reads it, in ``backward`` where that is set, else in the newest version.
    """

    def __init__(self, module: nn.Module, newest: int = 0) -> None:
        super().__init__(module, newest)
        self._own_memory()
        self._only = self._kept[newest]
        self.backward: ByName | None = None

    def __getitem__(self, number: int) -> Version:
        return self._only

    def gather(self, number: int) -> None:
        """Add the gradients that a backward left to those of the parameters."""
        super().gather(self.newest)

    def update(self, step: Callable[[], None], needed: Collection[int]) -> None:
        """Let the optimizer change the weights in place."""
        step()
        self.newest += 1
        self._kept = {self.newest: self._only}

    def _own_memory(self) -> None:
        """Give parameters that share memory, or begin inside some, memory of their own: they are told apart by it."""
        starts = [p.untyped_storage().data_ptr() for p in self.parameters.values()]
        for parameter, start in zip(self.parameters.values(), starts, strict=True):
            if parameter.storage_offset() or starts.count(start) > 1:
                parameter.data = parameter.data.clone()
        self._kept = {self.newest: self._leaves()}

    def by_name(self) -> torch.autograd.graph.saved_tensors_hooks:
        """While it is entered, weights are saved by name."""
        names = {leaf.untyped_storage().data_ptr(): name for name, leaf in self._only.items() if leaf.numel()}

        def pack(tensor: torch.Tensor) -> object:
            name = names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if name is None:
                return tensor
            return _View(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(packed: object) -> torch.Tensor:
            if isinstance(packed, _View):
                weights = self._only if self.backward is None else self.backward
                return weights[packed.name].detach().as_strided(packed.size, packed.stride, packed.offset)
            assert isinstance(packed, torch.Tensor)
            return packed

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
