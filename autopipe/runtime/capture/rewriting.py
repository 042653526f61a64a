"""Buffers that a module changes in its forward, kept apart for each micro-batch.

A pipeline runs the forward of the next micro-batch before the backward of this one, which may need what the buffers
held. So each forward works on copies, and what it made of them is copied back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from autopipe.runtime.capture.torch_private import has_values


class Buffers:
    """A module's buffers at a moment, to see which of them have changed since.

    A norm's statistics change without counting as written to, so their values are kept too, unless they have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        self._versions = _versions(dict(module.named_buffers()))

    def changed(self) -> tuple[str, ...]:
        """The names of those that were written to or replaced, or hold other values."""
        now = dict(self._module.named_buffers())
        versions = _versions(now)
        return tuple(
            name
            for name, value in self.values.items()
            if versions.get(name) != self._versions[name] or (has_values(value) and not torch.equal(value, now[name]))
        )


def parameter_versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensor each of a module's parameters is, and how often it has been written to."""
    return _versions(dict(module.named_parameters()))


def _versions(named: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in named.items()}


@contextlib.contextmanager
def on_copies(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While active, the named buffers are copies; afterwards they hold what was made of those."""
    places = [(module.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in names)]
    kept = [owner._buffers[leaf] for owner, leaf in places]
    for (owner, leaf), buffer in zip(places, kept, strict=True):
        owner._buffers[leaf] = None if buffer is None else buffer.detach().clone()
    try:
        yield
    finally:
        for (owner, leaf), buffer in zip(places, kept, strict=True):
            made = owner._buffers[leaf]
            owner._buffers[leaf] = buffer
            if buffer is not None and made is not None:
                with torch.no_grad():
                    buffer.copy_(made)
