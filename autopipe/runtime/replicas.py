"""Where this process stands among the replicas of a pipeline, and what the replicas agree on after a step.

Process ``replica × depth + rank`` is rank ``rank`` of pipeline ``replica``. Every replica runs its part of the global
batch; then the gradients of each parameter are summed over all processes that hold it: those of the same rank in the
other replicas, and those of other ranks that hold a tied parameter. Shares of the whole batch make the sum the batch's
gradient (runtime/shares.py). Buffers that a forward changes are those of replica 0 afterwards, as in torch's
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError

_BUCKET_BYTES = 4 << 20
"""Small gradients are summed together, up to this size: a message costs more than its bytes, and the sum is a copy."""


@dataclass(frozen=True)
class Replica:
    """This process's place: its replica's ``index`` of ``count``, and its ``rank`` of ``depth`` in that pipeline.

    ``group`` are the pipeline's processes, ``peers`` those of the same rank in all replicas; both None where there is
    one replica: then all processes are the pipeline, and this one has no peers.
    """

    index: int
    count: int
    rank: int
    depth: int
    group: dist.ProcessGroup | None = None
    peers: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, depth: int, count: int) -> Replica:
        """The place of this process; all processes call it. Raises UsageError for another number of processes."""
        if dist.get_world_size() != depth * count:
            raise UsageError(
                f"{dist.get_world_size()} processes were started, the plan is for {depth * count}: "
                f"torchrun --nproc-per-node {depth * count}"
            )
        index, rank = divmod(dist.get_rank(), depth)
        if count == 1:
            return cls(index, count, rank, depth)
        pipelines = [dist.new_group(range(k * depth, (k + 1) * depth)) for k in range(count)]
        peers = [dist.new_group(range(r, depth * count, depth)) for r in range(depth)]
        return cls(index, count, rank, depth, pipelines[index], peers[rank])

    def across(self, ranks: Iterable[int]) -> list[int]:
        """The processes of these ranks of the pipeline, in all replicas."""
        return sorted(k * self.depth + rank for k in range(self.count) for rank in ranks)

    def groups(self, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The group of each set of several ranks, in all replicas; all processes make all, in one order."""
        made = {ranks: dist.new_group(self.across(ranks)) for ranks in sorted(set(wanted)) if len(ranks) > 1}
        return made | ({(self.rank,): self.peers} if self.peers is not None else {})


class GradientSums:
    """Sums each parameter's gradient over the processes that hold it.

    ``holders`` gives, for each of this rank's trained parameters, the ranks of the pipeline that hold it; ``shared``
    are the sets of several ranks that hold a parameter, anywhere.
    """

    def __init__(
        self,
        replica: Replica,
        holders: Mapping[nn.Parameter, tuple[int, ...]],
        shared: Iterable[tuple[int, ...]],
    ) -> None:
        self._replica = replica
        self._groups = replica.groups(shared)
        self._held = {
            ranks: [parameter for parameter, held in holders.items() if held == ranks] for ranks in self._groups
        }

    def prepare(self) -> None:
        """Before a step: what was summed by the step before stays on the first process only, else it counts twice."""
        for ranks, parameters in self._held.items():
            if dist.get_rank() != self._replica.across(ranks)[0]:
                for parameter in parameters:
                    parameter.grad = None

    def run(self) -> None:
        """After a step: sum. A gradient that no process has stays None, as in one process."""
        for ranks, parameters in self._held.items():
            if not parameters:
                continue
            group = self._groups[ranks]
            if self._replica.count > 1:
                parameters = _with_gradient(parameters, group)
            for bucket in _buckets([_gradient(parameter) for parameter in parameters]):
                _sum(bucket, group)


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, zeros where this process has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _with_gradient(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[nn.Parameter]:
    """The parameters that have a gradient on any process of the group."""
    have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    return [parameter for parameter, has in zip(parameters, have.tolist(), strict=True) if has]


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


def _sum(bucket: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0], group=group)
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([gradient.numel() for gradient in bucket])
    for gradient, piece in zip(bucket, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def same_buffers(replica: Replica, buffers: Iterable[torch.Tensor]) -> None:
    """Give every replica the buffers of replica 0; nothing where there is one."""
    for buffer in buffers if replica.peers is not None else ():
        dist.broadcast(buffer, replica.rank, group=replica.peers)
