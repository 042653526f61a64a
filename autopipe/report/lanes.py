"""A timeline as lines of text, a lane a rank: each column is an equal part of the step.

    rank 0 FFIIIFFWWWFFIII…
    rank 1 ··FFIIIFFWWW…

A column shows the operation that takes most of it, · where that is nothing, in the order F B I W O among equals.
"""

from __future__ import annotations

from autopipe.core.schedule import Op
from autopipe.core.timeline import Span, Timeline

_IDLE = "·"
_LETTERS = (_IDLE, *(op.value for op in Op))


def lanes(timeline: Timeline, *, width: int = 100) -> str:
    """The lanes, each of at most ``width`` columns with its label."""
    label = len(f"rank {timeline.ranks - 1} ")
    columns = max(1, width - label)
    rows = []
    for rank in range(timeline.ranks):
        spans = [span for span in timeline.spans if span.rank == rank]
        rows.append(f"{f'rank {rank}':<{label}}{_lane(spans, timeline.step_s, columns)}")
    return "\n".join(rows)


def _lane(spans: list[Span], step_s: float, columns: int) -> str:
    """One letter a column."""
    width_s = step_s / columns or 1.0
    shares = [dict.fromkeys(_LETTERS, 0.0) for _ in range(columns)]
    for span in spans:
        first, last = int(span.start_s / width_s), int(span.end_s / width_s)
        for column in range(first, min(last, columns - 1) + 1):
            inside = min(span.end_s, (column + 1) * width_s) - max(span.start_s, column * width_s)
            shares[column][span.action.op.value] += max(inside, 0.0)
    for share in shares:
        share[_IDLE] = width_s - sum(share.values())
    return "".join(_largest(share) for share in shares)


def _largest(share: dict[str, float]) -> str:
    most = max(share.values())
    busy = [letter for letter in _LETTERS[1:] if share[letter] >= most * (1 - 1e-9)]
    return busy[0] if busy else _IDLE
