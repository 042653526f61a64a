"""Run a model and leave it as it was: parameters, buffers, gradients, plain attributes, random state."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopipe.runtime.capture.torch_private import OpOverload, is_wrapped, storage_key, tree_leaves
from autopipe.runtime.capture.weightless import runnable

SEED = 0
"""The seed of every run of a capture."""


@contextlib.contextmanager
def undisturbed(model: nn.Module, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Run the model under one fixed seed and leave it as it was.

    Gives the inputs to run it with (see weightless.runnable).
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(owner, name, b, b.detach().clone()) for owner, name, b in _buffers(model)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), same_attributes(model), same_parameters(model):
            torch.manual_seed(SEED)
            for parameter, _ in gradients:
                parameter.grad = None
            with runnable(model, tensors) as given:
                yield given
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for owner, name, buffer, content in buffers:
            with torch.no_grad():
                buffer.detach().copy_(content)
            owner._buffers[name] = buffer


@dataclass(frozen=True)
class Plain:
    """What modules hold in plain attributes, in collections and as hooks, at one moment."""

    attributes: list[tuple[nn.Module, dict[str, Any]]]
    contents: list[tuple[list[Any] | dict[Any, Any] | set[Any], Any]]

    @classmethod
    def of(cls, model: nn.Module) -> Plain:
        """What the model's modules hold now."""
        attributes = [(module, dict(vars(module))) for module in model.modules()]
        contents = [
            (value, copy.copy(value))
            for _, known in attributes
            for name, value in known.items()
            if isinstance(value, list | dict | set) and name not in ("_parameters", "_buffers", "_modules")
        ]
        return cls(attributes, contents)

    def put_back(self) -> None:
        """Let the modules hold that again."""
        for module, known in self.attributes:
            module.__dict__.clear()
            module.__dict__.update(known)
        for value, content in self.contents:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Put back what a forward sets on its modules: plain attributes, the content of collections, hooks."""
    before = Plain.of(model)
    try:
        yield
    finally:
        before.put_back()


@contextlib.contextmanager
def same_parameters(model: nn.Module) -> Iterator[None]:
    """Put back parameters that a forward changes, as a moving average of others or clipped weights.

    A copy is made of those that are written to, when they are: all of them would take a model's memory twice.
    """
    memory = [(parameter, parameter.detach()) for parameter in model.parameters() if not parameter.is_meta]
    writes = _Writes([tensor for _, tensor in memory])
    try:
        with writes:
            yield
    finally:
        with torch.no_grad():
            for tensor, content in writes.kept:
                tensor.copy_(content)
            for parameter, tensor in memory:
                if parameter.data_ptr() != tensor.data_ptr():
                    parameter.data = tensor


class _Writes(TorchFunctionMode):
    """Copies each of some tensors before the first operation that may write into its memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = {storage_key(tensor): tensor for tensor in tensors}
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._known and _may_write(func, kwargs or {}):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not is_wrapped(leaf):
                    self._keep(storage_key(leaf))
        return func(*args, **(kwargs or {}))

    def _keep(self, key: int) -> None:
        tensor = self._known.pop(key, None)
        if tensor is not None:
            self.kept.append((tensor, tensor.clone()))


def _may_write(func: Any, keywords: dict[str, Any]) -> bool:
    """Whether an operation may write into what it is given: by its schema, or by its name."""
    if isinstance(func, OpOverload):
        return bool(func._schema.is_mutable)
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__index__") or "out" in keywords


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer
