"""Timelines as a trace-event file, which Perfetto (ui.perfetto.dev) and chrome://tracing load.

The format is Google's "Trace Event Format": times in microseconds, a process for each timeline, a thread for each rank,
complete events (X) for actions, counters (C) for what each rank holds, and flow events (s, f) from the action that
makes a value to the one on another rank that needs it.

    autopipe show plan.json --trace trace.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from autopipe.core.schedule import Action, Op
from autopipe.core.timeline import Span, Timeline
from autopipe.report.svg import NAMES

Event = dict[str, Any]
_US = 1e6


def trace_json(timelines: Sequence[Timeline]) -> str:
    """The file's text; each timeline is a process, named by its origin."""
    numbers = count(1)
    events = [event for pid, line in enumerate(timelines) for event in trace_events(line, pid, numbers)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def trace_events(timeline: Timeline, pid: int = 0, numbers: Iterator[int] | None = None) -> Iterator[Event]:
    """The events of one timeline as process ``pid``; flows take their ids from ``numbers``."""
    yield _named("process_name", pid, 0, timeline.origin)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for rank in range(timeline.ranks):
        yield _named("thread_name", pid, rank, f"rank {rank}")
        for time_s, size in timeline.memory[rank]:
            at = {"pid": pid, "tid": rank, "ts": time_s * _US}
            yield {"ph": "C", "name": f"memory of rank {rank}", **at, "args": {"bytes": size}}
    for span in timeline.spans:
        yield _complete(span, pid)
    yield from _flows(timeline, pid, numbers or count(1))


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: Span, pid: int) -> Event:
    rank, action, start_s, end_s = span
    return {
        "ph": "X",
        "name": str(action),
        "cat": NAMES[action.op],
        "pid": pid,
        "tid": rank,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "args": {"stage": action.stage, "micro_batch": action.micro_batch},
    }


def _flows(timeline: Timeline, pid: int, numbers: Iterator[int]) -> Iterator[Event]:
    """An arrow for each value that goes to another rank: a flow begins inside the span that makes it."""
    spans = {span.action: span for span in timeline.spans}
    for maker in timeline.spans:
        for needing in _readers(maker.action):
            reader = spans.get(needing)
            if reader is None or reader.rank == maker.rank:
                continue
            what = "activation" if maker.action.op is Op.F else "gradient"
            name = f"{what} {maker.action.stage} to {needing.stage}"
            common = {"name": name, "cat": "transfer", "id": next(numbers), "pid": pid}
            inside_s = max(maker.start_s, maker.end_s - 1 / _US)
            yield {"ph": "s", **common, "tid": maker.rank, "ts": inside_s * _US}
            yield {"ph": "f", "bp": "e", **common, "tid": reader.rank, "ts": reader.start_s * _US}


def _readers(action: Action) -> tuple[Action, ...]:
    """The actions of other stages that need what this one makes; only those of the table exist."""
    stage, op, batch = action
    if op is Op.F:
        return (Action(stage + 1, Op.F, batch),)
    if op in (Op.B, Op.I):
        return (Action(stage - 1, Op.B, batch), Action(stage - 1, Op.I, batch))
    return ()
