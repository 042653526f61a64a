"""Where this process stands among the replicas of a pipeline, and what the replicas agree on after a step.

Process ``replica × depth + rank`` is rank ``rank`` of pipeline ``replica``. Every replica runs its part of the global
batch; then the gradients of each parameter are summed over all processes that hold it: those of the same rank in the
other replicas, and those of other ranks that hold a tied parameter. Shares of the whole batch make the sum the batch's
gradient (shares.py). Buffers that a forward changes are those of replica 0 afterwards, as in torch's
DistributedDataParallel, and so are parameters that it changes, which that leaves as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.plan import PLANNED_ONLY, Plan
from autopipe.runtime.ranks.gradients import sum_gradients
from autopipe.runtime.ranks.host import hurry_messages


def require_equal(plan: Plan) -> Plan:
    """The plan. Raises UsageError where its stages have replicas of their own."""
    if plan.unequal:
        raise UsageError(PLANNED_ONLY)
    return plan


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
            hurry_messages()
            return cls(index, count, rank, depth)
        pipelines = [dist.new_group(range(k * depth, (k + 1) * depth)) for k in range(count)]
        hurry_messages()  # not of the groups that sum, which are made later: there it makes waking up slower
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
            if parameters:
                sum_gradients(parameters, self._groups[ranks])


def same_state(replica: Replica, changed: Iterable[torch.Tensor]) -> None:
    """Give every replica what replica 0 has; nothing where there is one."""
    for tensor in changed if replica.peers is not None else ():
        dist.broadcast(tensor, replica.rank, group=replica.peers)
