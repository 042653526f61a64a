"""Which parts of a step a picture shows: all of it, or of a long one its warm-up, one steady period, and its drain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from autopipe.core.schedule import Op
from autopipe.core.timeline import Span, Timeline

MOST_SPANS = 5000
"""A step with more spans is shown in parts: a page of more is slow, and its spans are narrower than a pixel."""
T = TypeVar("T")


class Panel(NamedTuple):
    """A stretch of the step that is drawn; ``name`` is empty where that is all of it."""

    name: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.stop_s - self.start_s


def panels(timeline: Timeline, most: int = MOST_SPANS) -> tuple[Panel, ...]:
    """The whole step, or three parts of it that show at most about ``most`` spans.

    The warm-up ends with the first backward of stage 0, the drain begins with that stage's last forward; each is
    shortened to a third of ``most`` where it has more. A step of 1F1B with very many micro-batches (warm-up, one
    forward and one backward on each rank, drain):

        rank 0   0F0 0F1         0B0 ┆ 0F7 0B6 ┆ 0F99 0B98      0B99
        rank 1       1F0 1B0 1F1 1B1 ┆ 1B6 1F7 ┆      1F99 1B99
    """
    spans = sorted(timeline.spans, key=lambda span: span.start_s)
    if len(spans) <= most:
        return (Panel("", 0.0, timeline.step_s),)
    share = max(1, most // 3)
    filled = min(span.end_s for span in spans if span.action.stage == 0 and span.action.op is not Op.F)
    emptying = max(span.start_s for span in spans if span.action.stage == 0 and span.action.op is Op.F)
    warm = Panel("warm-up", 0.0, min(filled, spans[share].start_s))
    drain = Panel("drain", max(emptying, spans[-share].start_s), timeline.step_s)
    return warm, _middle(spans, share, warm.stop_s, drain.start_s), drain


def _middle(spans: Sequence[Span], share: int, after_s: float, before_s: float) -> Panel:
    """One period of the actions in the middle of what is left; where they have none, or a long one, what is allowed."""
    between = [span for span in spans if span.start_s >= after_s and span.end_s <= before_s]
    if not between:
        return Panel("middle", after_s, min(before_s, after_s))
    whole = [span for span in between if span.rank == between[0].rank]
    eighth = len(whole) // 8
    for row in (whole[2 * eighth : 6 * eighth + 1], whole[eighth : 3 * eighth + 1]):  # GPipe's first half has one
        length = period([span.action[:2] for span in row])
        if length is not None:
            break
    first = row[0]
    later = [span for span in between if span.start_s >= first.start_s]
    latest_s = later[min(share, len(later) - 1)].start_s
    if length is None:
        return Panel("middle", first.start_s, latest_s)
    stop_s = row[length].start_s
    if stop_s > latest_s:
        return Panel("part of a steady period", first.start_s, latest_s)
    return Panel("one steady period", first.start_s, stop_s)


def period(items: Sequence[T]) -> int | None:
    """After how many items the sequence repeats itself, seen at least twice; None where it does not.

    n minus the longest border of the sequence, by the failure function of Knuth, Morris and Pratt (1977).

    >>> period("abcabcab"), period("aaaa"), period("abcd")
    (3, 1, None)
    """
    borders = [0] * len(items)
    for place, (_, item) in enumerate(pairwise(items), 1):
        border = borders[place - 1]
        while border and items[border] != item:
            border = borders[border - 1]
        borders[place] = border + (items[border] == item)
    length = len(items) - borders[-1] if items else 0
    return length if length and 2 * length <= len(items) else None
