"""Which receives are posted last, by hand; they are compared with torch's in tests/runtime/test_torch_ir.py."""

from __future__ import annotations

import autopipe.schedules  # noqa: F401  (registers them)
from autopipe.core.lowering import posted_last
from autopipe.core.schedule import kind


def _last(name: str, ranks: int, micro_batches: int) -> set[str]:
    return {str(action) for action in posted_last(kind(name).schedule(ranks, micro_batches))}


def test_1f1b_asks_for_gradients_when_it_needs_them() -> None:
    """torch: 1RECV_F0 1F0 1RECV_F1 1B0 1F1 1RECV_F2 1B1 …, and 0SEND_F1 0RECV_B0 0B0 on the other side."""
    assert _last("1F1B", 2, 4) == {"1F0", "0B0", "0B1", "0B2", "0B3"}


def test_gpipe_asks_for_everything_when_it_needs_it() -> None:
    assert _last("GPipe", 2, 3) == {"1F0", "1F1", "1F2", "0B0", "0B1", "0B2"}


def test_one_rank_asks_nobody() -> None:
    assert _last("1F1B", 1, 4) == set()
