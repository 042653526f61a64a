"""The trace file by the rules of the trace-event format, and its counts by parsing it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from autopipe.report.trace import trace_json
from autopipe.simulate import simulate_plan
from tests.samples import check_result, plan
from tests.test_panels import line

REQUIRED = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "tid": int, "ts": float, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float, "bp": str},
}
"""The fields of each phase that is used, after Google's "Trace Event Format"."""


def events(*timelines) -> list[dict]:
    content = json.loads(trace_json(timelines))
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    assert content["displayTimeUnit"] in ("ms", "ns")
    return content["traceEvents"]


@pytest.fixture(scope="module")
def both():
    return events(simulate_plan(plan()), check_result().timeline)


def test_every_event_has_the_fields_of_its_phase(both):
    for event in both:
        for name, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[name], (int, float) if kind is float else kind)
        assert set(event) == {"ph", *REQUIRED[event["ph"]]}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_there_is_an_event_for_each_action_and_each_memory_point(both):
    timelines = simulate_plan(plan()), check_result().timeline
    found = Counter((event["ph"], event["pid"]) for event in both)
    for pid, timeline in enumerate(timelines):
        assert found["X", pid] == len(timeline.spans)
        assert found["C", pid] == sum(map(len, timeline.memory))
    names = {event["pid"]: event["args"]["name"] for event in both if event["name"] == "process_name"}
    assert names == {0: "predicted", 1: "measured"}
    threads = [event["args"]["name"] for event in both if event["name"] == "thread_name"]
    assert threads == ["rank 0", "rank 1"] * 2


def test_the_times_are_microseconds(both):
    first = next(event for event in both if event["ph"] == "X" and event["pid"] == 0)
    span = simulate_plan(plan()).spans[0]
    assert (first["name"], first["ts"]) == (str(span.action), span.start_s * 1e6)
    assert first["dur"] == pytest.approx((span.end_s - span.start_s) * 1e6)


def test_actions_of_a_rank_do_not_overlap(both):
    rows = defaultdict(list)
    for event in both:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(row))


@pytest.mark.parametrize(
    ("timeline", "crossing"),
    [
        (line("1F1B", 4, 6), 3),
        (line("ZB-V", 2, 4, 2), 2),  # the turn of the V stays on its rank
        (line("Interleaved1F1B", 2, 4, 2), 3),
    ],
)
def test_a_flow_goes_from_each_maker_to_its_reader_on_another_rank(timeline, crossing):
    found = events(timeline)
    starts = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    micro_batches = 1 + max(span.action.micro_batch for span in timeline.spans)
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * crossing * micro_batches
    slices = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"]
    for number, start in starts.items():
        end = ends[number]
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"] + 1e-3
        assert any(rank == start["tid"] and a <= start["ts"] < b for rank, a, b in slices)
        assert any(rank == end["tid"] and a == end["ts"] for rank, a, b in slices)


def test_ids_of_flows_are_not_shared_between_timelines(both):
    ids = [event["id"] for event in both if event["ph"] == "s"]
    assert len(set(ids)) == len(ids) == 2 * 8
