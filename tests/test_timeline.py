"""Timelines from what ranks recorded."""

from __future__ import annotations

from autopipe.core.schedule import Action, Op
from autopipe.core.timeline import Memory, Span, Timeline


def test_the_ranks_clocks_make_one_step_from_its_first_forward_to_its_last_end() -> None:
    first = [Span(0, Action(0, Op.F, 0), 7.0, 8.0), Span(0, Action(0, Op.B, 0), 11.0, 13.0)]
    second = [Span(1, Action(1, Op.F, 0), 8.5, 9.5), Span(1, Action(1, Op.B, 0), 9.5, 11.0)]
    memory = ((Memory(0.0, 5),), (Memory(0.0, 6),))
    line = Timeline.of_ranks([first, second], "measured", memory)
    assert [(span.rank, str(span.action), span.start_s, span.end_s) for span in line.spans] == [
        (0, "0F0", 0.0, 1.0),
        (1, "1F0", 1.5, 2.5),
        (1, "1B0", 2.5, 4.0),
        (0, "0B0", 4.0, 6.0),
    ]
    assert (line.step_s, line.peak_bytes, line.origin) == (6.0, (5, 6), "measured")
    assert Timeline.of_ranks([first, second], "emulated").peak_bytes == (0, 0)
