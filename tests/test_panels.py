"""Which parts of a step are drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopipe.schedules  # noqa: F401  registers the schedules
from autopipe.core.schedule import kind
from autopipe.core.timeline import Timeline
from autopipe.report.panels import MOST_SPANS, panels, period
from autopipe.simulate import simulate
from tests.synthetic import FAST, stage


def line(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Timeline:
    schedule = kind(name).schedule(ranks, micro_batches, stages_per_rank=stages_per_rank)
    return simulate(schedule, [stage(1.0)] * schedule.stages, [FAST] * (schedule.stages - 1))


def drawn(timeline: Timeline, most: int) -> int:
    shown = panels(timeline, most)
    return sum(
        any(span.end_s > panel.start_s and span.start_s < panel.stop_s for panel in shown) for span in timeline.spans
    )


@given(st.lists(st.integers(0, 2), max_size=24))
def test_the_period_is_the_shortest_that_shifts_the_sequence_onto_itself(items):
    shifts = [n for n in range(1, len(items) // 2 + 1) if items[n:] == items[:-n]]
    assert period(items) == (shifts[0] if shifts else None)


def test_a_short_step_is_drawn_whole():
    timeline = line("1F1B", 4, 8)
    assert panels(timeline) == (("", 0.0, timeline.step_s),)


def test_a_long_1f1b_is_drawn_as_the_docstring_says():
    timeline = line("1F1B", 2, 100)
    warm, middle, drain = panels(timeline, 90)
    assert [warm.name, middle.name, drain.name] == ["warm-up", "one steady period", "drain"]
    # F = 1 s, B = 2 s: rank 0 runs F0 F1, waits, and ends B0 at 6; the period is a forward and a backward
    assert (warm.start_s, warm.stop_s) == (0.0, 6.0)
    assert middle.seconds == pytest.approx(3.0)
    assert drain.stop_s == timeline.step_s
    last = max(span.start_s for span in timeline.spans if str(span.action) == "0F99")
    assert drain.start_s == last


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "stages_per_rank"),
    [
        ("1F1B", 4, 3000, 1),
        ("GPipe", 4, 3000, 1),
        ("Interleaved1F1B", 4, 1000, 4),
        ("ZB-H1", 8, 600, 1),
        ("1F1B", 64, 128, 1),
    ],
)
def test_a_long_step_is_three_parts_in_order_and_few_spans(name, ranks, micro_batches, stages_per_rank):
    timeline = line(name, ranks, micro_batches, stages_per_rank)
    shown = panels(timeline)
    assert len(timeline.spans) > MOST_SPANS
    assert len(shown) == 3
    ends = [moment for panel in shown for moment in (panel.start_s, panel.stop_s)]
    assert ends == sorted(ends)
    assert (ends[0], ends[-1]) == (0.0, timeline.step_s)
    assert all(panel.seconds > 0 for panel in shown)
    assert drawn(timeline, MOST_SPANS) <= MOST_SPANS + 6 * ranks  # those cut off at an edge count too


def test_the_steady_part_of_gpipe_is_one_action():
    _, middle, _ = panels(line("GPipe", 2, 3000))
    assert middle.name == "one steady period"
    assert middle.seconds in (pytest.approx(1.0), pytest.approx(2.0))
