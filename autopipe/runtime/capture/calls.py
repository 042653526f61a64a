"""What the calls of a module take, give and change, as seen in real runs of the model at two micro-batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopipe.runtime.capture.attributes import Attributes, attributes, changed
from autopipe.runtime.capture.inputs import Signature
from autopipe.runtime.capture.restoring import undisturbed
from autopipe.runtime.capture.rewriting import Buffers, parameter_versions
from autopipe.runtime.capture.torch_private import tree_flatten, tree_leaves, tree_unflatten


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


@dataclass(frozen=True)
class Known:
    """What one call of a module returns, tensors replaced by Made, and what else it does.

    ``changes`` are the positions of the tensors that it changes in place, ``rewrites`` the names of its own buffers
    that it changes. ``leaves`` is a plain attribute that it changes, as ``cell.hidden``, or empty.
    """

    output: Any
    batch_at: BatchAt | None
    changes: tuple[int, ...]
    rewrites: tuple[str, ...]
    leaves: str

    def left_behind(self) -> tuple[str, ...]:
        """What the next call finds changed, by name."""
        return (*self.rewrites, self.leaves) if self.leaves else self.rewrites


@dataclass(frozen=True)
class _Seen:
    """One call in one eager run: the shapes that it takes, what it returns, what it changes; see Known."""

    output: Any
    shapes: list[torch.Size]
    changes: tuple[int, ...]
    rewrites: tuple[str, ...]
    leaves: str


@dataclass(frozen=True)
class _Call:
    """A call that is running: the tensors that it was given, their shapes and versions, and the module's own state."""

    module: nn.Module
    tensors: list[torch.Tensor]
    shapes: list[torch.Size]
    versions: list[int]
    buffers: Buffers
    parameters: dict[str, tuple[int, int]]
    attributes: Attributes

    @classmethod
    def of(cls, module: nn.Module, given: Any) -> _Call:
        """A call that begins."""
        taken = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        shapes, versions = [t.shape for t in taken], [t._version for t in taken]
        own = (Buffers(module), parameter_versions(module), attributes(module))
        return cls(module, taken, shapes, versions, *own)

    def ended(self, output: Any) -> _Seen:
        """What is known of it when it returns."""
        now = [tensor._version for tensor in self.tensors]
        changes = tuple(n for n, (before, after) in enumerate(zip(self.versions, now, strict=True)) if before != after)
        left = [
            f"{path}.{name}".lstrip(".") for path, name in changed(self.attributes, attributes(self.module)).items()
        ]
        return _Seen(output, self.shapes, changes, self.buffers.changed(), left[0] if left else "")


class CannotKeepWhole(Exception):
    """A module that cannot be one operation; its parent may be."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path = path


def known_calls(
    model: nn.Module, paths: Sequence[str], signature: Signature, tensors: Sequence[torch.Tensor]
) -> dict[str, list[Known]]:
    """For each path, its calls: compared between the example and twice the example."""
    small = _run(model, paths, signature, tensors)
    large = _run(model, paths, signature, [torch.cat([t, t]) if t.dim() else t for t in tensors])
    for path in paths:
        if len(small[path]) != len(large[path]):
            raise CannotKeepWhole(path, f"runs {len(small[path])} times in one forward, {len(large[path])} in another")
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
        running.append(_Call.of(module, (args, kwargs)))

    def after(path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = running.pop()
            if call.parameters != parameter_versions(module):
                raise CannotKeepWhole(path, "changes its parameters, which the micro-batch before still needs")
            found[path].append(call.ended(output))

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


def _compare(path: str, small: _Seen, large: _Seen, batch: int) -> Known:
    growing = (
        BatchAt(n, dim, size // batch)
        for n, (before, after) in enumerate(zip(small.shapes, large.shapes, strict=True))
        for dim, size in enumerate(before)
        if after[dim] == 2 * size and size % batch == 0
    )
    leaves, form = tree_flatten(small.output)
    pairs = zip(leaves, tree_leaves(large.output), strict=True)
    made = [_made(path, a, b, batch) for a, b in pairs]
    return Known(tree_unflatten(made, form), next(growing, None), small.changes, small.rewrites, small.leaves)


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
