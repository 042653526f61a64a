"""The model's inputs as flat keyword tensors: their names, and the check that a later batch fits."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopipe.core.errors import ModelError
from autopipe.runtime.capture.torch_private import TreeSpec, tree_flatten_with_path, tree_unflatten

Inputs = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Leaf:
    """One leaf of the inputs. ``shape`` is the example's; None for a constant, which ``value`` holds."""

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    value: Any = None


@dataclass(frozen=True)
class Signature:
    """How a batch of inputs becomes flat tensors and back. ``batch`` is the example's micro-batch size."""

    spec: TreeSpec
    leaves: tuple[Leaf, ...]
    batch: int

    @classmethod
    def of(cls, model: nn.Module, inputs: Inputs) -> Signature:
        """The signature of an example. Raises ModelError when it holds no tensor, or batches of two sizes."""
        paths, spec = tree_flatten_with_path(_call_form(inputs))
        taken: set[str] = set()
        leaves = tuple(_leaf(_name(model, path, taken), value) for path, value in paths)
        return cls(spec, leaves, _batch(leaves))

    @property
    def tensors(self) -> tuple[Leaf, ...]:
        """The leaves that are tensors, in order."""
        return tuple(leaf for leaf in self.leaves if leaf.shape is not None)

    def flatten(self, inputs: Inputs) -> list[torch.Tensor]:
        """The tensors of a batch, in order. Raises ModelError that names the first leaf that does not fit."""
        found, spec = tree_flatten_with_path(_call_form(inputs))
        if spec != self.spec:
            names = ", ".join(leaf.name for leaf in self.leaves)
            raise ModelError(
                f"these inputs are nested in another way than those the model was captured with ({names}): "
                f"pass the same arguments in every batch"
            )
        values = [value for _, value in found]
        for leaf, value in zip(self.leaves, values, strict=True):
            _check(leaf, value)
        tensors = [v for leaf, v in zip(self.leaves, values, strict=True) if leaf.shape is not None]
        sizes = {leaf.name: t.shape[0] for leaf, t in zip(self.tensors, tensors, strict=True) if leaf.shape}
        if len(set(sizes.values())) > 1:
            raise ModelError(f"the inputs disagree on the batch size in dimension 0: {sizes}")
        return tensors

    def call_form(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for the model, from its flat tensors."""
        left = iter(tensors)
        values = [leaf.value if leaf.shape is None else next(left) for leaf in self.leaves]
        args, kwargs = tree_unflatten(values, self.spec)
        return tuple(args), dict(kwargs)


def _call_form(inputs: Inputs) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return [], {key: inputs[key] for key in sorted(inputs)}
    return list(inputs), {}


def _name(model: nn.Module, path: Sequence[Any], taken: set[str]) -> str:
    """``input_ids`` for the first parameter of that name, ``pixels_0`` for a leaf inside another argument."""
    keys: list[Any] = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    kind, first, *rest = keys
    if kind == 0:
        names = [
            p.name for p in inspect.signature(model.forward).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD
        ]
        first = names[first] if first < len(names) else f"input_{first}"
    text = re.sub(r"\W+", "_", "_".join(map(str, (first, *rest)))) or "input"
    text = f"_{text}" if text[0].isdigit() else text
    text = f"{text}_" if keyword.iskeyword(text) or text == "self" else text
    while text in taken:
        text += "_"
    taken.add(text)
    return text


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, torch.Tensor):
        return Leaf(name, tuple(value.shape), value.dtype)
    return Leaf(name, None, None, value)


def _batch(leaves: Sequence[Leaf]) -> int:
    sizes = {leaf.name: leaf.shape[0] for leaf in leaves if leaf.shape}
    if not sizes:
        raise ModelError("the example inputs hold no tensor with a batch dimension: pass at least one")
    if len(set(sizes.values())) > 1:
        raise ModelError(f"dimension 0 of every input must be the batch, but the sizes differ: {sizes}")
    return next(iter(sizes.values()))


def _check(leaf: Leaf, value: Any) -> None:
    if leaf.shape is None:
        if not _same(leaf.value, value):
            raise ModelError(
                f"input {leaf.name} is {value!r}, the model was captured with {leaf.value!r}: "
                f"only tensors may change from batch to batch"
            )
        return
    if not isinstance(value, torch.Tensor):
        raise ModelError(f"input {leaf.name} is a {type(value).__name__}, a tensor is needed")
    if value.dtype != leaf.dtype:
        raise ModelError(f"input {leaf.name} has dtype {value.dtype}, the model was captured with {leaf.dtype}")
    if value.dim() != len(leaf.shape) or tuple(value.shape[1:]) != leaf.shape[1:]:
        raise ModelError(
            f"input {leaf.name} has shape {tuple(value.shape)}, the model was captured with {leaf.shape}: "
            f"only dimension 0, the batch, may change; pad to that shape or plan again"
        )


def _same(first: Any, second: Any) -> bool:
    try:
        return first is second or bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False
