"""torch's stage, which keeps what crosses its boundaries only as long as it is needed.

Torch makes the receive buffers of all micro-batches before the first one, keeps them from step to step, and keeps all
that it sent until the step's end. Here a buffer is made when its receive is posted and dropped after the backward (in
an evaluation after the forward), and what was sent is let go when it is known to have been taken (sent.py).

Facts that the code relies on (each is seen by tests/runtime/test_torch_stage.py):
- buffers are made by ``_prepare_forward_infra`` and ``_prepare_backward_infra``, on the stage's ``device``; with static
  metadata these make nothing else, so that there meta tensors stand for them;
- a buffer is read after ``get_…_recv_ops`` of its micro-batch was called, and for the last time in its backward;
- an empty list of send operations is waited for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from autopipe.core.schedule import Op
from autopipe.runtime.tables.sent import Key, Sent

_META = torch.device("meta")


class Stage(PipelineStage):
    """torch's stage; ``sent`` is shared by all stages of the rank. Its arguments are torch's."""

    sent: Sent

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **options)

    def _prepare_backward_infra(self, *args: Any, **options: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **options)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, _META
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives into new buffers."""
        _make(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives into new buffers."""
        if self.has_backward and not self.is_last:
            _make(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Gradients of the next stage, on this rank; where there is none torch writes zeros into the buffer."""
        pairs = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        _make([info for info, gradient in pairs if gradient is None], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the sends are begun here."""
        self._send(Key(self.stage_index + 1, Op.F, fwd_chunk_id), super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None: the sends are begun here."""
        self._send(Key(self.stage_index - 1, Op.B, bwd_chunk_id), super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def _send(self, key: Key, operations: list[dist.P2POp]) -> None:
        begun = [dist.isend(op.tensor, op.peer, group=op.group, tag=op.tag) for op in operations]
        self.sent.add(key, [work for work in begun if work], [op.tensor for op in operations])

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """A forward, whose activations have come."""
        self._heard(Key(self.stage_index, Op.F, fwd_chunk_id))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.has_backward:  # nothing reads its inputs any more
            _drop(self.args_recv_info[fwd_chunk_id])
            self.fwd_cache[fwd_chunk_id] = self.fwd_cache[fwd_chunk_id][0], []
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """A backward, whose gradients have come; what was received for it is dropped."""
        self._heard(Key(self.stage_index, Op.B, bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        if self.has_backward:
            _drop(self.args_recv_info[bwd_chunk_id])
            _drop(self.grad_recv_info[bwd_chunk_id])

    def _heard(self, key: Key) -> None:
        source, here = key.source, self.stage_index_to_group_rank[self.stage_index]
        if 0 <= source < self.num_stages and self.stage_index_to_group_rank[source] != here:
            self.sent.heard(key)


def _make(infos: Iterable[Any], device: torch.device) -> None:
    """Give receives their buffers; an input of the model and what needs no gradient have none."""
    for info in infos:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device=device)


def _drop(infos: Iterable[Any]) -> None:
    for info in infos:
        if info.buffer is not None:
            info.buffer = torch.empty_like(info.buffer, device=_META)
