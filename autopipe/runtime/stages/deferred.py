"""Weight gradients that wait: the backward gives the input gradient at once and stores the rest for later.

The zero-bubble schedules (Qi et al., 2023, arXiv:2401.10241) split a backward into I, the gradient of the input, and
W, the gradients of the weights. Here an operation on a parameter becomes a Function whose backward computes I and
puts W into a WeightGradients. I is then an ordinary backward that frees everything that W does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


_Where = tuple[list[int], list[int], list[int], bool, list[int], int]
"""Stride, padding, dilation, transposed, output padding and groups of a convolution."""


class WeightGradients:
    """The weight gradients that the backward has put off so far, and the operations that put theirs off."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def counterpart(self, operation: Any) -> tuple[Callable[..., Tensor], int, int] | None:
        """What computes the same as an operation and puts its weight gradients off, if anything does.

        With it come the positions of the weight and the bias among the arguments.
        """
        known: dict[Any, tuple[Callable[..., Tensor], int, int]] = {
            aten.linear.default: (self.linear, 1, 2),
            aten.addmm.default: (self.addmm, 2, 0),
            aten.conv1d.default: (self.convolution, 1, 2),
            aten.conv2d.default: (self.convolution, 1, 2),
            aten.conv3d.default: (self.convolution, 1, 2),
        }
        return known.get(operation)

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """aten.linear."""
        result: Tensor = _Linear.apply(self, _as_autocast(x), w, b)  # type: ignore[no-untyped-call]
        return result

    def addmm(self, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """aten.addmm."""
        result: Tensor = _Addmm.apply(self, b, _as_autocast(x), w)  # type: ignore[no-untyped-call]
        return result

    def convolution(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """aten.conv1d, conv2d and conv3d."""
        dims = w.dim() - 2
        numbers = [_each(value, dims) for value in (stride, padding, dilation)]
        where: _Where = (numbers[0], numbers[1], numbers[2], False, [0] * dims, groups)
        result: Tensor = _Convolution.apply(self, _as_autocast(x), w, b, where)  # type: ignore[no-untyped-call]
        return result

    def put_off(self, work: Callable[[], None]) -> None:
        """Keep work for later."""
        self._waiting.append(work)

    def take(self) -> Callable[[], None]:
        """All that waits, as one function that accumulates into the parameters' gradients."""
        work, self._waiting = self._waiting, []

        def run() -> None:
            with torch.no_grad():
                while work:
                    work.pop(0)()  # each piece frees its tensors when it is done

        return run


def accumulate(parameter: Tensor | None, gradient: Callable[[], Tensor]) -> None:
    """Add to a parameter's gradient, as a backward would; nothing for one that is absent or frozen."""
    if parameter is None or not parameter.requires_grad:
        return
    value = gradient().to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad += value


def _each(value: int | Sequence[int], dims: int) -> list[int]:
    """One number for each dimension."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _as_autocast(x: Tensor) -> Tensor:
    """The input as autocast would hand it to the operation; a Function has to see to this itself."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _Linear(torch.autograd.Function):
    """``x @ wᵀ + b``."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.later, ctx.w, ctx.b, ctx.used = later, w, b, w.to(x.dtype)
        return torch.nn.functional.linear(x, ctx.used, None if b is None else b.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,), w, b = ctx.saved_tensors, ctx.w, ctx.b

        def work() -> None:
            accumulate(w, lambda: _rows(g).t() @ _rows(x))
            accumulate(b, lambda: _rows(g).sum(0))

        ctx.later.put_off(work)
        return None, (g @ ctx.used if ctx.needs_input_grad[1] else None), None, None


class _Addmm(torch.autograd.Function):
    """``b + x @ w``, as transformers' Conv1D has it."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.later, ctx.w, ctx.b, ctx.used = later, w, b, w.to(x.dtype)
        return torch.addmm(b.to(x.dtype), x, ctx.used)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,), w, b = ctx.saved_tensors, ctx.w, ctx.b

        def work() -> None:
            accumulate(w, lambda: x.t() @ g)
            accumulate(b, lambda: g.sum(0))

        ctx.later.put_off(work)
        return None, None, (g @ ctx.used.t() if ctx.needs_input_grad[2] else None), None


class _Convolution(torch.autograd.Function):
    """A convolution in 1, 2 or 3 dimensions with padding given in numbers."""

    @staticmethod
    def forward(ctx: Any, later: WeightGradients, x: Tensor, w: Tensor, b: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x)
        ctx.later, ctx.w, ctx.b, ctx.where, ctx.used = later, w, b, where, w.to(x.dtype)
        result: Tensor = aten.convolution(x, ctx.used, None if b is None else b.to(x.dtype), *where)
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,), w, b, where, used = ctx.saved_tensors, ctx.w, ctx.b, ctx.where, ctx.used

        def gradients(which: Sequence[bool]) -> Any:
            return aten.convolution_backward(g, x, used, None if b is None else [b.shape[0]], *where, which)

        def work() -> None:
            _, dw, db = gradients([False, w.requires_grad, b is not None and b.requires_grad])
            accumulate(w, lambda: dw)
            accumulate(b, lambda: db)

        ctx.later.put_off(work)
        return None, (gradients([True, False, False])[0] if ctx.needs_input_grad[1] else None), None, None, None
