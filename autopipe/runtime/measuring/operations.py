"""The operations that run, with their arithmetic and their traffic: what a roofline is applied to.

Arithmetic is counted by torch's own formulas (torch.utils.flop_counter). Traffic is what an operation reads and writes,
each tensor once; views cost nothing, and of what is only looked up (an embedding's table) what is taken counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_CONVOLUTION = ("convolution", "cudnn_convolution", "mkldnn_convolution")
_SPECIAL = (
    "softmax", "norm", "gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "pow", "sqrt", "sin", "cos", "nll_loss",
    "mish", "elu", "dropout", "bernoulli",
)  # fmt: skip
_LOOKED_UP = ("embedding", "index", "gather", "index_select", "select_backward", "slice_backward")


class Work(NamedTuple):
    """One operation: its class (core.hardware.CLASSES), its floating-point operations, its bytes, and its dtype."""

    kind: str
    flops: float
    bytes: int
    dtype: str


class Operations(TorchDispatchMode):
    """Notes the work of every operation while it is entered; ``take`` gives what was noted since the last time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted: list[Work] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        work = work_of(func, args, kwargs, result)
        if work is not None:
            self._noted.append(work)
        return result

    def take(self) -> list[Work]:
        """What was noted since the last call."""
        noted, self._noted = self._noted, []
        return noted


def work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work | None:
    """The work of one operation; None for a view and for what touches no tensor."""
    read, made = _tensors((args, kwargs)), _tensors(result)
    known = {tensor.untyped_storage()._cdata for tensor in read}
    changes = _changes(func)
    if not made or (not changes and all(tensor.untyped_storage()._cdata in known for tensor in made)):
        return None
    packet = getattr(func, "overloadpacket", func)
    name = str(packet).rpartition(".")[2]
    formula = flop_registry.get(packet, _MORE.get(str(packet)))
    flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
    written = sum(_bytes(tensor) for tensor in made)
    size = written + sum(_bytes(tensor) for tensor in read)
    if name.removesuffix("_").startswith(_LOOKED_UP):
        size = 2 * written
    dtype = str(next((t.dtype for t in (*made, *read) if t.is_floating_point()), made[0].dtype))
    return Work(_kind(name, flops), flops, size, dtype.removeprefix("torch."))


def _kind(name: str, flops: float) -> str:
    if name.startswith(_ATTENTION):
        return "attention"
    if name.startswith(_CONVOLUTION):
        return "convolution"
    if flops:
        return "matmul"
    return "special" if any(part in name for part in _SPECIAL) else "pointwise"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """What is there to read or write: an expanded tensor is no larger than its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@functools.cache
def _changes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    """A product of groups of rows with a matrix each: every row of ``a`` meets one matrix of ``b``."""
    return 2 * a.shape[0] * math.prod(b.shape[-2:])


def _grouped_backward(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    return 2 * _grouped(a, b)


_MORE: dict[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _grouped_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: _attention(q, k, v),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_, **__: (
        5 * _attention(q, k, v) // 2
    ),
}
"""Formulas that torch's counter lacks."""


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Two products, as torch counts attention on CUDA; the backward makes five."""
    batch, heads, rows, width = q.shape
    return 2 * batch * heads * rows * k.shape[-2] * (width + v.shape[-1])


class AsOnCuda(TorchFunctionMode):
    """Replaces operations that dispatch by device with those that a GPU runs, so that what they keep is the same.

    On a CPU dropout keeps a mask as wide as its input, and attention with dropout keeps its whole matrix.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        other = _ON_CUDA.get(func)
        made = other(*args, **kwargs) if other else None
        return func(*args, **kwargs) if made is None else made


def _dropout(
    input: torch.Tensor, p: float = 0.5, train: bool = True, training: bool = True, inplace: bool = False
) -> torch.Tensor | None:
    if not (0 < p < 1 and train and training) or inplace:
        return None
    result: torch.Tensor = aten.native_dropout(input, p, True)[0]
    return result


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None:
        flash: torch.Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


_ON_CUDA: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: _dropout,
    torch.dropout: _dropout,
    torch.nn.functional.dropout: _dropout,
    aten.scaled_dot_product_attention.default: _sdpa,
    torch.nn.functional.scaled_dot_product_attention: _sdpa,
}
