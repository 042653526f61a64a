"""What exploring a schedule showed, as text and as a page."""

from __future__ import annotations

from autopipe.core.units import format_duration, format_percent, many
from autopipe.exploring import Explored
from autopipe.report.html import page, timeline_figure
from autopipe.report.lanes import lanes
from autopipe.report.markup import cards, said, section
from autopipe.report.rows import clean


def explored_text(explored: Explored, *, width: int = 100) -> str:
    """The figures, then the lanes."""
    rows = [
        ("schedule", _shape(explored)),
        ("makespan", f"{format_duration(explored.makespan_s)} · {format_percent(explored.timeline.idle)} idle"),
        ("", f"{_gap(explored)} of {format_duration(explored.lower_bound_s)}"),
        ("stage time", f"{format_duration(explored.stage_time_s)} · {format_percent(explored.stage_idle)} idle"),
        ("in flight", f"{_peaks(explored)} micro-batches' activations, by rank"),
    ]
    head = "\n".join(f"{label:<10} {text}" for label, text in rows)
    return f"{head}\n\n{lanes(explored.timeline, width=width)}"


def explored_html(explored: Explored) -> str:
    """The figures and the timeline's picture as one page that needs nothing else."""
    name = explored.schedule.name
    figures = (
        ("makespan", format_duration(explored.makespan_s), _gap(explored)),
        ("idle", format_percent(explored.timeline.idle), "of all ranks' time"),
        ("longest stage time", format_duration(explored.stage_time_s), f"{format_percent(explored.stage_idle)} idle"),
        ("in flight", f"{max(explored.peak_in_flight):g}", "micro-batches' activations of a rank"),
    )
    head = f"<header><h1>{said(name)}</h1><p>{said(_shape(explored))}</p></header>"
    picture = timeline_figure(explored.timeline, title=f"One step of {name}", key="timeline")
    return page(name, f"{head}\n{cards(figures)}\n{section('Timeline', 'timeline', picture)}")


def _shape(explored: Explored) -> str:
    table = explored.schedule
    sizes = (many(table.ranks, "rank"), many(table.stages, "stage"), many(table.micro_batches, "micro-batch"))
    return " · ".join((clean(table.name), *sizes))


def _gap(explored: Explored) -> str:
    return f"within {format_percent(explored.gap)} of the bound"


def _peaks(explored: Explored) -> str:
    return " ".join(f"{peak:g}" for peak in explored.peak_in_flight)
