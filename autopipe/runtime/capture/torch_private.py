"""The capture's only user of torch's private names, each with the reason why no public one does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

# Operations are public as torch.ops.…, their types are not.
from torch._guards import active_fake_mode
from torch._ops import HigherOrderOperator, OpOverload

# The only tensors that have a device, shapes and gradients but no memory are torch's own.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv, free_unbacked_symbols

# torch.export speaks this pytree in its own signatures; torch.utils has no public Python version of it.
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

__all__ = [
    "BY_VALUES",
    "NO_SHAPE_RULE",
    "HigherOrderOperator",
    "OpOverload",
    "TreeSpec",
    "fake_mode",
    "forward_hooks",
    "gradient_hooks",
    "has_backward_hooks",
    "has_values",
    "inlined_checkpoints",
    "is_custom_function",
    "is_data_dependent",
    "is_persistent",
    "is_wrapped",
    "mark_not_persistent",
    "noted_checkpoints",
    "replaced_trunc_normal",
    "storage_key",
    "symbol",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

# What an export raises has no public type.
BY_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
NO_SHAPE_RULE = UnsupportedOperatorException


@functools.cache
def fake_mode() -> FakeTensorMode:
    """The one mode of all stand-ins for parameters without memory; two modes would not mix. Takes real tensors too."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values can be looked at here and now: not one without memory, nor where fake ones are made."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or active_fake_mode() is not None)


def storage_key(value: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share memory.

    ``data_ptr`` is 0 for every meta and fake tensor; the address of the storage object is not.
    """
    return int(value.untyped_storage()._cdata)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether torch.func has wrapped a tensor while it transforms a function: then it has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def symbol(value: Any) -> Any:
    """The sympy expression of a symbolic size; SymInt has no public way to it."""
    return value.node.expr


def is_data_dependent(value: Any) -> bool:
    """Whether a size depends on the data, not only on the inputs' shapes."""
    return bool(free_unbacked_symbols(value))


@contextlib.contextmanager
def inlined_checkpoints() -> Iterator[None]:
    """Run what a reentrant checkpoint wraps as it is: an export would lose its gradients, for it runs without any.

    A non-reentrant checkpoint already exports as what it wraps. torch.utils.checkpoint has no switch for this.
    """
    with _replaced_apply(lambda apply, function, preserve, *args: function(*args)):
        yield


@contextlib.contextmanager
def noted_checkpoints() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether the running forward is inside a checkpoint, of either kind.

    torch.utils.checkpoint tells nobody that it is active. A non-reentrant one is known by its saved-tensor hooks.
    """
    depth = 0

    def noting(apply: Callable[..., Any], *args: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return apply(*args)
        finally:
            depth -= 1

    def inside() -> bool:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return depth > 0 or (hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", ""))

    with _replaced_apply(noting):
        yield inside


@contextlib.contextmanager
def _replaced_apply(by: Callable[..., Any]) -> Iterator[None]:
    kind: Any = torch.utils.checkpoint.CheckpointFunction
    original = kind.apply
    kind.apply = functools.partial(by, original)
    try:
        yield
    finally:
        del kind.apply  # it was inherited


@contextlib.contextmanager
def replaced_trunc_normal(by: Callable[..., Any]) -> Iterator[None]:
    """While active, ``by(function, tensor, *args)`` fills a tensor with truncated normal numbers.

    It draws again what falls outside, so its operations depend on values; torch.nn.init has no switch for this.
    """
    original = torch.nn.init._no_grad_trunc_normal_
    torch.nn.init._no_grad_trunc_normal_ = functools.partial(by, original)
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


def is_custom_function(node: Any) -> bool:
    """Whether an autograd node was made by a torch.autograd.Function of the user."""
    return (
        isinstance(node, torch.autograd.function.BackwardCFunction)
        and "BackwardHookFunction" not in type(node).__name__
    )


def gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether anybody waits for a tensor's gradient; a tensor has no public list of its hooks."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Whether a module was given backward hooks; nn.Module has no public list of them."""
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


def forward_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """The hook tables of a module that run around its forward, by attribute name."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: getattr(module, name) for name in names}


def mark_not_persistent(module: torch.nn.Module, name: str) -> None:
    """Keep a buffer that was put into ``_buffers`` out of ``state_dict``."""
    module._non_persistent_buffers_set.add(name)


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Whether a module's buffer belongs to its ``state_dict``."""
    return name not in module._non_persistent_buffers_set
