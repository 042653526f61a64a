"""What a rank has sent, kept until it is known to have been taken.

Nobody ever waits for a send: it is over when something comes from its receiver that the receiver made after it had
taken what was sent, which the table tells. core/in_flight.py counts what is kept so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopipe.core.schedule import Action, Op, Schedule


class Key(NamedTuple):
    """A message: activations (F) or gradients (B) of a micro-batch, for a stage."""

    stage: int
    op: Op
    micro_batch: int

    @property
    def source(self) -> int:
        """The stage that makes it."""
        return self.stage - 1 if self.op is Op.F else self.stage + 1


class _Kept(NamedTuple):
    """Tensors on their way to a rank, and the place in that rank's row of the action that takes them."""

    works: Sequence[dist.Work]
    tensors: Sequence[torch.Tensor]
    taken_at: int


class Sent:
    """What one rank has sent in one run of a table."""

    def __init__(self, schedule: Schedule) -> None:
        self._placement = schedule.placement
        self._places = [{action: place for place, action in enumerate(row)} for row in schedule.order]
        self._kept: dict[int, list[_Kept]] = {}

    def add(self, key: Key, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor]) -> None:
        """Keep what is on its way to a stage of another rank."""
        kept = self._kept.setdefault(self._placement[key.stage], [])
        kept.append(_Kept(works, tensors, self._place(key.stage, key)))

    def heard(self, key: Key) -> None:
        """A message from another rank is here: let go what that rank took before it made it."""
        self._let_go(self._placement[key.source], self._place(key.source, key))

    def finish(self) -> None:
        """Wait until all has been taken: at the end of the table."""
        for rank, places in enumerate(self._places):
            self._let_go(rank, len(places))

    def _let_go(self, rank: int, before: int) -> None:
        kept = self._kept.get(rank, [])
        for work in (work for each in kept if each.taken_at < before for work in each.works):
            work.wait()
        self._kept[rank] = [each for each in kept if each.taken_at >= before]

    def _place(self, stage: int, key: Key) -> int:
        """The place of a message's action in the row of the rank that has the stage; B stands for I too."""
        places = self._places[self._placement[stage]]
        place = places.get(Action(stage, key.op, key.micro_batch))
        return places[Action(stage, Op.I, key.micro_batch)] if place is None else place
