"""Sums of parameters' gradients over the processes that hold them.

Small gradients are copied together, because a message costs more than its bytes; one such bucket is filled while the
one before it is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_BYTES = 4 << 20
"""Small gradients are summed together, up to this size: the copy is memory."""

_UNDER_WAY = 2
"""So many buckets at a time."""


@dataclass(frozen=True)
class _Sum:
    """A bucket that is being summed: its gradients, the tensor that holds them all, and what to wait for."""

    gradients: Sequence[torch.Tensor]
    whole: torch.Tensor
    work: dist.Work

    @classmethod
    def start(cls, gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> _Sum:
        """Begin; a single gradient needs no copy."""
        alone = len(gradients) == 1 and gradients[0].is_contiguous()
        whole = gradients[0] if alone else torch.cat([gradient.reshape(-1) for gradient in gradients])
        return cls(gradients, whole, dist.all_reduce(whole, group=group, async_op=True))

    def finish(self) -> None:
        """Wait, and copy the sums back."""
        self.work.wait()
        if self.whole is not self.gradients[0]:
            pieces = self.whole.split([gradient.numel() for gradient in self.gradients])
            for gradient, piece in zip(self.gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum each parameter's gradient over the group's processes, which all give the same parameters in one order.

    A process without a gradient counts as zeros; a gradient that no process has stays None, as in one process.
    """
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    agreed = dist.all_reduce(have, dist.ReduceOp.MAX, group=group, async_op=True)
    under_way: deque[_Sum] = deque()
    for bucket in _buckets([_gradient(parameter) for parameter in parameters]):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().finish()
        under_way.append(_Sum.start(bucket, group))
    for each in under_way:
        each.finish()
    agreed.wait()
    for parameter, has in zip(parameters, have.tolist(), strict=True):
        if not has:
            parameter.grad = None


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, zeros where this process has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Gradients of one dtype together, as many as fit."""
    bucket: list[torch.Tensor] = []
    for gradient in sorted(gradients, key=lambda g: str(g.dtype)):
        full = sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES
        if bucket and (full or gradient.dtype is not bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
