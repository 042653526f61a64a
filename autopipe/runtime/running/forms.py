"""The form of a batch: everything of it but its rows and values. A graph serves one form, any number of rows."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from autopipe.core.errors import UsageError
from autopipe.runtime.workload import Inputs

WAIT_S = 60.0
"""How long a rank waits for the others to be given a batch of another form or size, too."""


def form_of(inputs: Inputs) -> str:
    """The form as text, ``['input_ids'] int64 (·, 12)``: equal forms have equal texts."""
    leaves, _ = tree_flatten_with_path(dict(sorted(inputs.items())) if isinstance(inputs, dict) else inputs)
    return ", ".join(f"{keystr(path)} {_leaf(value)}" for path, value in leaves)


def _leaf(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = ", ".join(("·", *map(str, value.shape[1:]))) if value.dim() else ""
    return f"{str(value.dtype).removeprefix('torch.')} ({sizes})"


def repeated(value: Any, size: int, rows: int) -> Any:
    """A nested batch of ``size`` rows as one of ``rows``, cut or repeated."""
    chosen = torch.arange(rows) % size
    return tree_map(
        lambda leaf: (
            leaf[chosen.to(leaf.device)]
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size
            else leaf
        ),
        value,
    )


class Agreement:
    """Makes sure that all ranks were given alike batches, whenever this rank's differ from those before.

    A rank that ran another table than its neighbours would hang; so a change is agreed on first, and costs nothing
    while there is none.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=WAIT_S))
        self._last = ""

    def on(self, what: str) -> None:
        """Raises UsageError on every rank where one was given something else, or nothing new within WAIT_S."""
        if what == self._last:
            return
        found: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(found, what, group=self._group)
        except RuntimeError as error:
            raise UsageError(
                f"rank {dist.get_rank()} was given {what}, but some rank was given nothing new within "
                f"{WAIT_S:.0f} s: give the whole global batch to every rank, in the same order"
            ) from error
        other = next((rank for rank, text in enumerate(found) if text != what), None)
        if other is not None:
            raise UsageError(
                f"rank {dist.get_rank()} was given {what}, rank {other} {found[other]}: give the whole global batch to "
                f"every rank, in the same order"
            )
        self._last = what
