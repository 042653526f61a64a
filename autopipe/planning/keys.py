"""What tells the cases of a space apart."""

from __future__ import annotations

from typing import NamedTuple

from autopipe.core.schedule import Kind

Name = tuple[int, int, int, str, int, str]
"""A key with the schedule by name."""


class Extent(NamedTuple):
    """How much of the devices and of the batch a case takes."""

    depth: int
    replicas: int
    micro_batch: int


class Key(NamedTuple):
    """What tells one case of a space from another."""

    depth: int
    replicas: int
    micro_batch: int
    kind: Kind
    stages_per_rank: int
    recompute: str

    @property
    def name(self) -> Name:
        """What tables of cases are kept by: a schedule itself is no quick key."""
        return self.depth, self.replicas, self.micro_batch, self.kind.name, self.stages_per_rank, self.recompute
