"""What exploring a schedule showed, as text and as a page."""

from __future__ import annotations

from autopipe.core.units import format_duration, format_percent
from autopipe.exploring import Explored
from autopipe.report.lanes import lanes


def explored_text(explored: Explored, *, width: int = 100) -> str:
    """The figures, then the lanes."""
    table = explored.schedule
    peaks = " ".join(f"{peak:g}" for peak in explored.peak_in_flight)
    bound = format_duration(explored.lower_bound_s)
    rows = [
        (
            "schedule",
            f"{table.name} · {table.ranks} ranks · {table.stages} stages · {table.micro_batches} micro-batches",
        ),
        ("makespan", f"{format_duration(explored.makespan_s)} · {format_percent(explored.timeline.idle)} idle"),
        ("", f"within {format_percent(explored.gap)} of the bound of {bound}"),
        ("stage time", f"{format_duration(explored.stage_time_s)} · {format_percent(explored.stage_idle)} idle"),
        ("in flight", f"{peaks} micro-batches' activations, by rank"),
    ]
    head = "\n".join(f"{label:<10} {text}" for label, text in rows)
    return f"{head}\n\n{lanes(explored.timeline, width=width)}"
