"""Plans, checks, profiles, schedules and clusters as text for a terminal. The only module that uses rich.

Every ``…_text`` function returns plain lines of at most ``width`` columns. ``show`` prints such text, coloured
where the console is a terminal. Names that come from a model or a file are data: they are never read as markup,
and characters that do not print are escaped.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.core.cluster import Cluster, Device
from autopipe.core.plan import Plan, Rejected, Stage
from autopipe.core.profile import NOISY, LayerCost, Profile
from autopipe.core.result import CheckResult, Rehearsal
from autopipe.core.schedule import Schedule
from autopipe.core.timeline import Timeline
from autopipe.core.units import format_bytes, format_count, format_duration, format_percent, many
from autopipe.report.rows import (
    LAYERS,
    Row,
    check_rows,
    clean,
    end_of,
    head_rows,
    layer_range,
    link_text,
    parity_rows,
    rehearsal_rows,
    rejected_rows,
    shape,
)
from autopipe.simulate import simulate_plan

_LABEL = 10
_TEXT = 48
_BAR = 10
_WAY = 34


def show(text: str) -> None:
    """Print on stdout; bars and headings are coloured where it is a terminal."""
    lines = Text(text)
    lines.highlight_regex(r"[█░]+", "cyan")
    lines.highlight_regex(r"(?m)^(stage|layer|why not|micro-batch)  .*$", "bold")
    lines.highlight_regex(r"\bpassed\b", "green")
    lines.highlight_regex(r"\bFAILED\b", "bold red")
    Console(soft_wrap=True, highlight=False).print(lines)


def plan_text(
    plan: Plan,
    *,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    measured: CheckResult | None = None,
    folder: Path | None = None,
    width: int = 100,
) -> str:
    """The plan: what was planned for what, a row a stage, what to expect, and why not otherwise.

    With ``profile`` and ``cluster`` the head says what they hold; with ``measured`` the foot says what a run of
    this plan showed. ``folder`` is where the plan's file lies: with it, paths are those of the current folder.
    """
    parts = [_plan_head(plan, profile, cluster, folder), _stage_table(plan), _plan_foot(plan)]
    if plan.rejected:
        parts.append(_rejected_table(plan.rejected))
    return _text([_spaced(*parts[:2]), *parts[2:], Text(), _verdict(plan, measured)], width)


def check_text(result: CheckResult, *, plan: Plan | None = None, width: int = 100) -> str:
    """Predicted against measured: step, stages (their predicted times are the plan's), memory; then parity."""
    rows = check_rows(result, plan)
    table = _table(("", "predicted", "measured", "error", ""), rows, left=(0, 4))
    return _text([table, Text(), _lines(parity_rows(result))], width)


def rehearsal_text(result: Rehearsal, *, width: int = 100) -> str:
    """A rehearsal: the step and each rank's idle time, predicted against measured; what the machine adds."""
    table = _table(("", "predicted", "measured", "error", ""), rehearsal_rows(result), left=(0, 4))
    added = f"{format_duration(result.overhead_s)} an action, {format_duration(result.message_s)} a message"
    lines = [("machine", f"adds {added}; both are in the prediction"), *(("note", note) for note in result.notes)]
    return _text([table, Text(), _lines(lines)], width)


def profile_text(profile: Profile, *, width: int = 100) -> str:
    """The layers with their costs at the largest micro-batch size, totals, and the totals at every other size."""
    largest = profile.micro_batches[-1] if profile.costs else None
    parts: list[RenderableType] = [_lines(_profile_head(profile))]
    if largest is not None:
        parts += [Text(), _layer_table(profile, largest), Text(), _size_table(profile)]
    return _text(parts, width)


def schedule_text(schedule: Schedule, *, width: int = 100) -> str:
    """The action table, a row a rank; what does not fit the width is cut off with an ellipsis."""
    cell = max((len(str(action)) for row in schedule.order for action in row), default=0)
    size = f"{many(schedule.ranks, 'rank')} · {many(schedule.micro_batches, 'micro-batch')}"
    head = f"schedule   {schedule.name} · {size}"
    rows = [
        _fit(f"rank {rank:>4}  " + " ".join(f"{action!s:<{cell}}" for action in row).rstrip(), width)
        for rank, row in enumerate(schedule.order)
    ]
    return "\n".join([_fit(clean(head), width), *rows])


def cluster_text(cluster: Cluster, *, width: int = 100) -> str:
    """Devices and links."""
    rows = [("cluster", f"{cluster.name} · {many(len(cluster), 'device')} · {cluster.origin}")]
    rows += [("device", _device(device)) for device in cluster.devices]
    rows += [
        ("link", f"{tier.name} · joins {many(tier.ranks, 'rank')} · {link_text(tier.link)}") for tier in cluster.tiers
    ]
    rows += [("source", source) for source in cluster.sources]
    rows += [("pair", f"ranks {pair.first} and {pair.second} · {link_text(pair.link)}") for pair in cluster.pairs]
    return _text([_lines(rows)], width)


def paragraph(text: str, *, width: int = 100) -> str:
    """Plain text, broken at blanks."""
    return "\n".join(textwrap.wrap(clean(text), width, break_on_hyphens=False))


# what the texts are made of


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _spaced(first: RenderableType, second: RenderableType) -> Group:
    return Group(first, Text(), second)


def _table(headers: Row, rows: Iterable[Row], left: Sequence[int] = (), first: int = 0) -> Table:
    """Columns two blanks apart, right-aligned but those in ``left``.

    Only a last column without a header may wrap, and the first one where ``first`` is how wide it may be.
    """
    table = Table(box=None, pad_edge=False, header_style="")
    for index, header in enumerate(headers):
        justify: JustifyMethod = "left" if index in left else "right"
        wraps = index == len(headers) - 1 and not header
        table.add_column(header, justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for row in rows:
        head, *cells = (clean(cell) for cell in row)
        head = "\n".join(textwrap.wrap(head, first, subsequent_indent="  ", break_on_hyphens=False)) if first else head
        table.add_row(*map(Text, (head, *cells)))
    return table


def _lines(rows: Iterable[Row]) -> Table:
    """Lines that begin with a label; a long text goes on under itself."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_LABEL - 2, max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def _text(parts: Iterable[RenderableType], width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _device(device: Device) -> str:
    speed = "" if device.speed == 1 else f" · {device.speed:.3g} × the profiled speed"
    return f"{device.count} × {device.name} ({format_bytes(device.memory_bytes)}){speed}"


def _bar(part: float) -> str:
    full = max(0, min(_BAR, round(part * _BAR)))
    return "█" * full + "░" * (_BAR - full)


# a plan


def _plan_head(plan: Plan, profile: Profile | None, cluster: Cluster | None, folder: Path | None) -> Table:
    rows = head_rows(plan, profile, cluster, folder)
    return _lines((label, f"{text:<{_TEXT}}  {where}") for label, text, where in rows)


def _stage_table(plan: Plan) -> Table:
    headers = ("stage", "rank", "layers", "fwd", "bwd", "weights", "peak memory", "idle")
    timeline = simulate_plan(plan)
    rows = []
    for index, stage in enumerate(plan.stages):
        first = stage.rank not in plan.schedule.placement[:index]
        rows.append((*_stage_cells(stage), *(_rank_cells(plan, timeline, stage.rank) if first else ("", ""))))
    return _table(headers, rows, left=(2,))


def _stage_cells(stage: Stage) -> Row:
    return (
        str(stage.index),
        str(stage.rank) + (f" × {stage.replicas}" if stage.replicas > 1 else ""),
        layer_range(stage),
        format_duration(stage.costs.forward_s),
        format_duration(stage.costs.backward_s),
        format_bytes(stage.costs.parameter_bytes),
    )


def _rank_cells(plan: Plan, timeline: Timeline, rank: int) -> Row:
    """Peak and idle of a rank: they stand once, with its first stage."""
    peak, limit = plan.predicted.peak_bytes[rank], plan.memory_limit_bytes[rank]
    return (f"{format_bytes(peak)} {_bar(peak / limit if limit else 1)}", format_percent(timeline.rank_idle(rank)))


def _plan_foot(plan: Plan) -> Table:
    expected = plan.predicted
    result = (
        f"{format_duration(expected.step_s)} a step · {expected.samples_per_s:.1f} samples/s · "
        f"{format_percent(expected.idle)} idle"
    )
    if expected.jitter_s:
        result += f" · {format_duration(expected.jitter_s)} of it jitter"
    limits = f"limited by {plan.limited_by} · within {format_percent(plan.gap)} of the bound"
    return _lines([("plan", shape(plan)), ("", result), ("", limits), *(("note", note) for note in plan.notes)])


def _rejected_table(rejected: Sequence[Rejected]) -> Table:
    return _table(("why not", "step", "idle", "peak", ""), rejected_rows(rejected), left=(0, 4), first=_WAY)


def _verdict(plan: Plan, measured: CheckResult | None) -> Table:
    if measured is None:
        return _lines([("checked", "not yet: run autopipe check")])
    if measured.plan_digest and measured.plan_digest != plan.digest:
        return _lines([("checked", "another plan than this one: run autopipe check again")])
    parity = "passed" if measured.parity.passed else "FAILED"
    step = format_duration(measured.measured.step_s)
    return _lines(
        [("checked", f"{step} a step measured ({format_percent(measured.error, sign=True)}) · parity {parity}")]
    )


# a profile


def _profile_head(profile: Profile) -> list[Row]:
    ties = f" · {many(len(profile.ties), 'tied parameter')}" if profile.ties else ""
    busy = f"{many(profile.processes, 'process')} busy, {many(profile.threads, 'thread')} each"
    return [
        (profile.model, f"{many(len(profile.layers), 'layer')} · {format_count(profile.parameters)} parameters{ties}"),
        ("device", f"{profile.device} · {profile.dtype} · {busy}"),
        (profile.origin, _certainty(profile)),
        *(("source", source) for source in profile.sources),
    ]


def _certainty(profile: Profile) -> str:
    """How well the costs are known."""
    if profile.origin != "measured":
        return f"not measured here{f' · ± {format_percent(profile.band)}' if profile.band else ''}"
    busy = ": the machine was busy, profile again when it is idle" if profile.noise > NOISY else ""
    return f"noise {format_percent(profile.noise)} · {format_duration(profile.overhead_s)} an action{busy}"


def _layer_table(profile: Profile, micro_batch: int) -> Table:
    costs = profile.at(micro_batch)
    rows = [
        _cost_row(str(index), layer.name, layer.parameter_bytes, [cost])
        for index, (layer, cost) in enumerate(zip(profile.layers, costs, strict=True))
    ]
    total = _cost_row("", "total", sum(layer.parameter_bytes for layer in profile.layers), costs)
    headers = (
        "layer",
        f"at micro-batch {micro_batch}",
        "weights",
        "fwd",
        "bwd",
        "held",
        "output",
        "optimizer",
        "spread",
    )
    return _table(headers, [*rows, total], left=(1,))


def _cost_row(index: str, name: str, weights: int, costs: Sequence[LayerCost]) -> Row:
    """One layer, or the sum of many; spreads and outputs do not add up."""
    single = len(costs) == 1 and bool(index)
    return (
        index,
        end_of(name, LAYERS),
        format_bytes(weights),
        format_duration(sum(cost.forward_s for cost in costs)),
        format_duration(sum(cost.backward_s for cost in costs)),
        format_bytes(sum(cost.held_after_forward_bytes for cost in costs)),
        format_bytes(costs[0].output_bytes) if single else "",
        format_duration(sum(cost.optimizer_s for cost in costs)),
        format_percent(costs[0].spread) if single else "",
    )


def _size_table(profile: Profile) -> Table:
    rows = []
    for size in profile.micro_batches:
        costs = profile.at(size)
        forward, backward = sum(cost.forward_s for cost in costs), sum(cost.backward_s for cost in costs)
        held = sum(cost.held_after_forward_bytes for cost in costs)
        each = (forward + backward) / size
        rows.append((str(size), *map(format_duration, (forward, backward, each)), format_bytes(held)))
    return _table(("micro-batch", "fwd", "bwd", "a sample", "held"), rows)
