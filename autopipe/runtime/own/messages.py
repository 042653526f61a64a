"""The messages of an action table: activations forward, gradients back, between ranks and within one.

Messages of one kind for one stage come in the order in which their sender makes them, which the table tells. So the
receiver asks for them in that order, some before it needs them (lowering.AHEAD), and a message never waits for its
receiver to get to it. What is sent is kept until it is known to have been taken (runtime/tables/sent.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopipe.core.lowering import AHEAD
from autopipe.core.schedule import Op, Schedule
from autopipe.runtime.ranks import launch
from autopipe.runtime.tables.sent import Key, Sent

Tensors = tuple[torch.Tensor, ...]


class _Channel:
    """Messages of one kind for one stage of this rank, in the order in which they come."""

    def __init__(self, source: int, tag: int, like: Tensors, batches: Sequence[int]) -> None:
        self.source, self.tag, self.like = source, tag, like
        self.place = {batch: place for place, batch in enumerate(batches)}
        self._batches = batches
        self._posted = 0
        self.coming: dict[int, tuple[Tensors, list[dist.Work]]] = {}

    def due(self, until: int) -> list[int]:
        """The micro-batches to ask for now, so that ``until`` messages have been asked for."""
        start, self._posted = self._posted, max(self._posted, min(until, len(self._batches)))
        return list(self._batches[start : self._posted])


class Messages:
    """What one rank sends and receives in one run of a table.

    ``receives[s]`` are tensors, meta ones too, like the activations that stage s receives; ``returns[s]`` like the
    gradients that come back for what it sends.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        receives: Mapping[int, Tensors],
        returns: Mapping[int, Tensors],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._schedule, self._rank, self._device, self._group = schedule, rank, device, group
        self._channels: dict[tuple[int, Op], _Channel] = {}
        self._here: dict[Key, Tensors] = {}
        self._sent = Sent(schedule)
        for stage in receives:
            if not schedule.is_first(stage):
                self._open(stage, Op.F, stage - 1, receives[stage])
            if not schedule.is_last(stage):
                self._open(stage, Op.B, stage + 1, returns[stage])
        self._ask([(channel, batch) for channel in self._channels.values() for batch in channel.due(AHEAD)])

    def _open(self, stage: int, op: Op, source: int, like: Tensors) -> None:
        """A channel from another stage, unless that is on this rank."""
        where = self._schedule.placement[source]
        if where != self._rank:
            ops = (Op.F,) if op is Op.F else (Op.B, Op.I)
            batches = [a.micro_batch for a in self._schedule.order[where] if a.stage == source and a.op in ops]
            self._channels[stage, op] = _Channel(where, _tag(stage, op), like, batches)

    def _ask(self, wanted: Sequence[tuple[_Channel, int]]) -> None:
        """Post receives."""
        for channel, batch in wanted:
            buffers = tuple(torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in channel.like)
            asks = [dist.P2POp(dist.irecv, b, channel.source, self._group, channel.tag) for b in buffers]
            channel.coming[batch] = buffers, dist.batch_isend_irecv(asks) if asks else []

    def take(self, key: Key) -> Tensors:
        """What a stage needs, when it is there; the next messages of its kind are asked for first."""
        channel = self._channels.get((key.stage, key.op))
        if channel is None:
            return self._here.pop(key)
        place = channel.place[key.micro_batch]
        self._ask([(channel, batch) for batch in channel.due(place + 1 + AHEAD)])
        tensors, works = channel.coming.pop(key.micro_batch)
        for work in works:
            work.wait()
        self._sent.heard(key)
        return tensors

    def send(self, key: Key, tensors: Tensors) -> None:
        """Hand tensors to a stage, here or on another rank; they must not be changed any more."""
        where = self._schedule.placement[key.stage]
        if where == self._rank:
            self._here[key] = tensors
            return
        if not tensors:
            return
        sends = [dist.P2POp(dist.isend, t, where, self._group, _tag(key.stage, key.op)) for t in tensors]
        self._sent.add(key, dist.batch_isend_irecv(sends), tensors)

    def finish(self) -> None:
        """Wait until all that was sent has been taken: at the end of the table."""
        launch.beat("a wait for what was sent", waiting=True)
        self._sent.finish()


def _tag(stage: int, op: Op) -> int:
    return 2 * stage + (op is not Op.F)
