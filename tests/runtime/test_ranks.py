"""The pool of ranks itself: a hang is found, and slowness is not taken for one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.runtime import ranks
from tests.runtime.ranks import Ranks


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(ranks, "STUCK_S", 2.0)
    monkeypatch.setattr(ranks, "_TICK_S", 0.2)
    made = Ranks()
    yield made
    made.close()


def compute(seconds: float) -> float:
    """Keep the processor busy for so long."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return seconds


def test_a_hang_is_told_from_slowness(pool: Ranks) -> None:
    assert pool.run(compute, 4.0, ranks=1) == [4.0]
    with pytest.raises(TimeoutError, match=r"ranks \{0\} hang: all have hardly computed for 2.0 s"):
        pool.run(time.sleep, 1000.0, ranks=1)
