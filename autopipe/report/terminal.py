"""Plans, checks, profiles, schedules and clusters as text for a terminal. The only module that uses rich.

Every ``…_text`` function returns plain lines of at most ``width`` columns. ``show`` prints such text, coloured
where the console is a terminal. Names that come from a model or a file are data: they are never read as markup,
and characters that do not print are escaped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.core.cluster import Cluster, Device, Link
from autopipe.core.plan import Plan, Rejected, Stage
from autopipe.core.profile import LayerCost, Profile
from autopipe.core.result import CheckResult
from autopipe.core.schedule import Schedule
from autopipe.core.timeline import Timeline
from autopipe.core.units import format_bandwidth, format_bytes, format_count, format_duration, format_percent
from autopipe.simulate import simulate

_LABEL = 10
_TEXT = 48
_BAR = 10
_LAYERS = 28
_NONE = "–"
Row = Sequence[str]


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
    width: int = 100,
) -> str:
    """The plan: what was planned for what, a row a stage, what to expect, and why not otherwise.

    With ``profile`` and ``cluster`` the head says what they hold; with ``measured`` the foot says what a run of
    this plan showed.
    """
    parts = [_plan_head(plan, profile, cluster), _stage_table(plan), _plan_foot(plan)]
    if plan.rejected:
        parts.append(_rejected_table(plan.rejected))
    return _text([_spaced(*parts[:2]), *parts[2:], Text(), _verdict(plan, measured)], width)


def check_text(result: CheckResult, *, plan: Plan | None = None, width: int = 100) -> str:
    """Predicted against measured: step, stages (their predicted times are the plan's), memory; then parity."""
    rows = [*_step_rows(result), *_stage_rows(result, plan), *_memory_rows(result)]
    table = _table(("", "predicted", "measured", "error", ""), rows, left=(0, 4))
    return _text([table, Text(), _lines(_parity_lines(result))], width)


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
    head = f"schedule   {schedule.name} · {schedule.ranks} ranks · {schedule.micro_batches} micro-batches"
    rows = [
        _fit(f"rank {rank:>4}  " + " ".join(f"{action!s:<{cell}}" for action in row).rstrip(), width)
        for rank, row in enumerate(schedule.order)
    ]
    return "\n".join([_fit(_clean(head), width), *rows])


def cluster_text(cluster: Cluster, *, width: int = 100) -> str:
    """Devices and links."""
    rows = [("cluster", f"{cluster.name} · {len(cluster)} devices · {cluster.origin}")]
    rows += [("device", _device(device)) for device in cluster.devices]
    rows += [("link", f"{tier.name} · joins {tier.ranks} ranks · {_link(tier.link)}") for tier in cluster.tiers]
    rows += [("pair", f"ranks {pair.first} and {pair.second} · {_link(pair.link)}") for pair in cluster.pairs]
    return _text([_lines(rows)], width)


# what the texts are made of


def _clean(text: str) -> str:
    """The text on one line, with everything that does not print as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _spaced(first: RenderableType, second: RenderableType) -> Group:
    return Group(first, Text(), second)


def _table(headers: Row, rows: Iterable[Row], left: Sequence[int] = ()) -> Table:
    """Columns two blanks apart, right-aligned but those in ``left``. Only a last column without a header may wrap."""
    table = Table(box=None, pad_edge=False, header_style="")
    for index, header in enumerate(headers):
        justify: JustifyMethod = "left" if index in left else "right"
        wraps = index == len(headers) - 1 and not header
        table.add_column(header, justify=justify, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for row in rows:
        table.add_row(*(Text(_clean(cell)) for cell in row))
    return table


def _lines(rows: Iterable[Row]) -> Table:
    """Lines that begin with a label; a long text goes on under itself."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=_LABEL - 2, max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(_clean(cell)) for cell in row))
    return table


def _text(parts: Iterable[RenderableType], width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _link(link: Link) -> str:
    return f"{format_bandwidth(link.bytes_per_s)}, {format_duration(link.latency_s)} a hop"


def _device(device: Device) -> str:
    speed = "" if device.speed == 1 else f" · {device.speed:.3g} × the profiled speed"
    return f"{device.count} × {device.name} ({format_bytes(device.memory_bytes)}){speed}"


def _bar(part: float) -> str:
    full = max(0, min(_BAR, round(part * _BAR)))
    return "█" * full + "░" * (_BAR - full)


def _end_of(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]


# a plan


def _plan_head(plan: Plan, profile: Profile | None, cluster: Cluster | None) -> Table:
    layers = f"{plan.stages[-1].stop} layers"
    size = f"{format_count(profile.parameters)} parameters" if profile else f"{_weights(plan)} of weights"
    source = plan.model.path and f"{plan.model.path}:{plan.model.builder}"
    sizes = " ".join(map(str, profile.micro_batches)) if profile else ""
    measured = f"{layers} × micro-batch {sizes}" if profile else f"digest {plan.profile.digest[:12]}"
    noise = f" · noise {format_percent(plan.noise)}" if plan.noise else ""
    rows = [
        (plan.model.name, f"{layers} · {size} · {plan.dtype}", source),
        ("cluster", _cluster_line(plan, cluster), plan.cluster.path),
        ("profile", f"{measured}{noise}", plan.profile.path),
    ]
    return _lines((label, f"{text:<{_TEXT}}  {where or ''}") for label, text, where in rows)


def _weights(plan: Plan) -> str:
    twice = sum(tie.bytes * (len(tie.stages) - 1) for tie in plan.ties)
    return format_bytes(sum(stage.costs.parameter_bytes for stage in plan.stages) - twice)


def _cluster_line(plan: Plan, cluster: Cluster | None) -> str:
    limits = sorted({format_bytes(limit): limit for limit in plan.memory_limit_bytes}.items(), key=lambda item: item[1])
    usable = " to ".join(text for text, _ in (limits if len(limits) < 3 else (limits[0], limits[-1])))
    hops = [hop for hop in plan.hops if hop]
    slowest = f" · {_link(min(hops, key=lambda hop: hop.bytes_per_s))}" if hops else ""
    origin = f", {cluster.origin}" if cluster else ""
    return f"{plan.depth * plan.replicas} × {plan.device} ({usable} usable){slowest}{origin}"


def _stage_table(plan: Plan) -> Table:
    headers = ("stage", "rank", "layers", "fwd", "bwd", "weights", "peak memory", "idle")
    costs = [stage.costs for stage in plan.stages]
    timeline = simulate(plan.schedule.parsed(), costs, plan.hops, overhead_s=plan.overhead_s)
    rows = []
    for index, stage in enumerate(plan.stages):
        first = stage.rank not in plan.schedule.placement[:index]
        rows.append((*_stage_cells(stage), *(_rank_cells(plan, timeline, stage.rank) if first else ("", ""))))
    return _table(headers, rows, left=(2,))


def _stage_cells(stage: Stage) -> Row:
    return (
        str(stage.index),
        str(stage.rank),
        _layer_range(stage),
        format_duration(stage.costs.forward_s),
        format_duration(stage.costs.backward_s),
        format_bytes(stage.costs.parameter_bytes),
    )


def _rank_cells(plan: Plan, timeline: Timeline, rank: int) -> Row:
    """Peak and idle of a rank: they stand once, with its first stage."""
    peak, limit = plan.predicted.peak_bytes[rank], plan.memory_limit_bytes[rank]
    return (f"{format_bytes(peak)} {_bar(peak / limit if limit else 1)}", format_percent(timeline.rank_idle(rank)))


def _layer_range(stage: Stage) -> str:
    """First and last layer; what the last one's path shares with the first one's is left out."""
    first, last = stage.layers[0], stage.layers[-1]
    if len(stage.layers) == 1:
        return _end_of(first, _LAYERS)
    start, end = first.split("."), last.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(start, end, strict=False))))
    last = _end_of(".".join(end[shared:]), _LAYERS // 2)
    return f"{_end_of(first, _LAYERS - 3 - len(last))} … {last}"


def _plan_foot(plan: Plan) -> Table:
    expected = plan.predicted
    result = (
        f"{format_duration(expected.step_s)} a step · {expected.samples_per_s:.1f} samples/s · "
        f"{format_percent(expected.idle)} idle"
    )
    limits = f"limited by {plan.limited_by} · within {format_percent(plan.gap)} of the bound"
    return _lines([("plan", _shape(plan)), ("", result), ("", limits), *(("note", note) for note in plan.notes)])


def _shape(plan: Plan) -> str:
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    parts = [
        plan.schedule.name,
        _many(len(plan.stages), "stage"),
        _many(plan.replicas, "replica") if plan.replicas > 1 else "",
        f"{_many(plan.micro_batches, 'micro-batch', 'es')} of {plan.micro_batch}",
        f"global batch {plan.global_batch}",
        f"recomputation in {_many(recomputed, 'layer')}" if recomputed else "",
    ]
    return " · ".join(filter(None, parts))


def _many(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{'' if number == 1 else plural}"


def _rejected_table(rejected: Sequence[Rejected]) -> Table:
    rows = [
        (
            _fit(other.what, 34),
            _NONE if other.step_s is None else format_duration(other.step_s),
            _NONE if other.idle is None else format_percent(other.idle),
            _NONE if other.peak_bytes is None else format_bytes(other.peak_bytes),
            other.reason,
        )
        for other in rejected
    ]
    return _table(("why not", "step", "idle", "peak", ""), rows, left=(0, 4))


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


# a check


def _error(predicted: float, measured: float) -> str:
    return format_percent(measured / predicted - 1, sign=True) if predicted else _NONE


def _step_rows(result: CheckResult) -> list[Row]:
    predicted, measured = result.predicted, result.measured
    spread = f"spread {format_percent(measured.spread)}"
    step = format_percent(result.error, sign=True)
    rates = (f"{predicted.samples_per_s:.1f}", f"{measured.samples_per_s:.1f}")
    return [
        ("step", format_duration(predicted.step_s), format_duration(measured.step_s), step, spread),
        ("samples/s", *rates, _error(predicted.samples_per_s, measured.samples_per_s), ""),
        ("idle", format_percent(predicted.idle), format_percent(result.timeline.idle), "", ""),
    ]


def _stage_rows(result: CheckResult, plan: Plan | None) -> Iterator[Row]:
    """What an action takes in a stage: by the plan its layers and the runtime's overhead, and as measured."""
    for index, stage in enumerate(result.stages):
        forward_s = backward_s = None
        if plan:
            forward_s = plan.stages[index].costs.forward_s + plan.overhead_s
            backward_s = plan.stages[index].costs.backward_s + plan.overhead_s
        yield _time_row(f"stage {index} forward", forward_s, stage.forward_s)
        yield _time_row(f"stage {index} backward", backward_s, stage.backward_s)


def _time_row(what: str, predicted: float | None, measured: float) -> Row:
    if predicted is None:
        return (what, _NONE, format_duration(measured), _NONE, "")
    return (what, format_duration(predicted), format_duration(measured), _error(predicted, measured), "")


def _memory_rows(result: CheckResult) -> list[Row]:
    resident = result.measured.resident_bytes
    return [
        (
            f"rank {rank} peak memory",
            format_bytes(before),
            format_bytes(after),
            _error(before, after),
            f"process {format_bytes(resident[rank])}" if rank < len(resident) else "",
        )
        for rank, (before, after) in enumerate(
            zip(result.predicted.peak_bytes, result.measured.peak_bytes, strict=True)
        )
    ]


def _parity_lines(result: CheckResult) -> list[Row]:
    parity = result.parity
    verdict = "passed" if parity.passed else "FAILED"
    differences = (
        f"losses differ by {_number(parity.max_loss_difference, '.1e')}, gradients by "
        f"{_number(parity.max_gradient_difference, '.1e')} from one process (at most {parity.tolerance:.0e})"
    )
    rows: list[Row] = [("parity", f"{verdict} · {differences}")]
    if parity.worst:
        rows.append(("", f"largest difference in {parity.worst}"))
    rows.append(("losses", " ".join(_number(loss, ".6g") for loss in parity.losses)))
    rows.append(("", " ".join(_number(loss, ".6g") for loss in parity.reference_losses) + " in one process"))
    return [*rows, *(("note", note) for note in result.notes)]


def _number(value: float | None, form: str) -> str:
    return "NaN" if value is None else format(value, form)


# a profile


def _profile_head(profile: Profile) -> list[Row]:
    ties = f" · {_many(len(profile.ties), 'tied parameter')}" if profile.ties else ""
    busy = f"{_many(profile.processes, 'process', 'es')} busy, {_many(profile.threads, 'thread')} each"
    return [
        (profile.model, f"{len(profile.layers)} layers · {format_count(profile.parameters)} parameters{ties}"),
        ("device", f"{profile.device} · {profile.dtype} · {busy}"),
        (profile.origin, f"noise {format_percent(profile.noise)} · {format_duration(profile.overhead_s)} an action"),
    ]


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
        _end_of(name, _LAYERS),
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
