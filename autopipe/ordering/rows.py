"""Orders as numbers, a row a rank: what the compiled loops work on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autopipe.core.schedule import Action, Op, Order, Shape


@dataclass(frozen=True)
class Listed:
    """An order that was made, and its times.

    ``stage_time_s`` is the longest time of a rank from its first start to its end.
    """

    shape: Shape
    rows: tuple[Any, ...]
    makespan_s: float
    stage_time_s: float

    @cached_property
    def order(self) -> Order:
        """The actions."""
        rows = [row if isinstance(row, list) else row.tolist() for row in self.rows]
        return tuple(tuple(action_of(code, self.shape.micro_batches) for code in row) for row in rows)


OPS = (Op.F, Op.I, Op.W, Op.B)
"""The operations in the order of their numbers."""


def action_of(code: int, batches: int) -> Action:
    """The action of a number, (4 · stage + operation) · micro-batches + micro-batch."""
    kind, batch = divmod(code, batches)
    return Action(kind // 4, OPS[kind % 4], batch)


def code_of(action: Action, batches: int) -> int:
    """The number of an action."""
    return (4 * action.stage + OPS.index(action.op)) * batches + action.micro_batch
