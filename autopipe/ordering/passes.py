"""Building blocks on the V placement: when the four F and I of a micro-batch run on a rank, in slots.

A block repeats every six slots (two F, two I, two W on a rank), so blocks of consecutive micro-batches interlock when
the slots of a rank differ modulo six. The sum of the slots between F and I of a rank, divided by twelve, is how many
micro-batches' activations it holds (Qi et al., 2024, arXiv 2405.15362).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopipe.ordering.listing import Rules

PERIOD = 6.0


class Slots(NamedTuple):
    """A rank's slots: F of its first stage (on the way down) and of its second (on the way up), then their I."""

    down: float
    up: float
    up_back: float
    down_back: float


def block_rules(slots: Sequence[Slots], *, fill: float, pull: float, balance: bool = False) -> Rules:
    """Rules that follow the block in each rank."""
    forwards = [slot.down for slot in slots] + [slot.up for slot in reversed(slots)]
    backs = [slot.down_back for slot in slots] + [slot.up_back for slot in reversed(slots)]
    return Rules(
        tuple(map(float, forwards)),
        tuple(map(float, backs)),
        PERIOD,
        fill=fill,
        pull=pull,
        strict=True,
        balance=balance,
    )


def block_variants(slots: Sequence[Slots]) -> list[Rules]:
    """The ways to fill gaps that are tried with a block."""
    pulls = (-1.0, 0.5, float("inf"))
    return [
        block_rules(slots, fill=fill, pull=pull, balance=balance)
        for fill in (0.0, 0.5, 1.0)
        for pull in pulls
        for balance in (False, True)
    ]
