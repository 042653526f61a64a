"""A plan as one HTML file that needs nothing else: no network, no fonts, and to read it no script.

    report(plan, measured=result, profile=profile) -> text of report.html
    page(title, body)                              the frame, for other pages
    timeline_figure(predicted, …)                  the picture with its zoom and its keys, for other pages

Every name from a model or a file is escaped. The page's own style and script lie beside this module and are put into
it; a policy in its head forbids the browser to load anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autopipe import __version__
from autopipe.core.cluster import Cluster
from autopipe.core.in_flight import kept
from autopipe.core.plan import Plan, Stage
from autopipe.core.profile import Profile
from autopipe.core.result import CheckResult
from autopipe.core.timeline import Timeline
from autopipe.core.units import format_bytes, format_duration, format_percent
from autopipe.core.versions import copies
from autopipe.report.layers import layer_section
from autopipe.report.markup import bar, cards, legend, rows_table, said, section, table
from autopipe.report.rows import check_rows, head_rows, parity_rows, rejected_rows, shape
from autopipe.report.svg import timeline_svg
from autopipe.report.traffic import traffic_section
from autopipe.simulate import simulate_plan

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_KEYS = "Arrow keys walk through the actions, + and − zoom, 0 shows all; so does the wheel with Ctrl."


def report(
    plan: Plan,
    *,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    measured: CheckResult | None = None,
    why: str = "",
) -> str:
    """The page of a plan. ``measured`` adds what a run of this very plan showed, ``profile`` the layers' costs, ``why``
    a paragraph in words.
    """
    timeline = simulate_plan(plan)
    sections = [
        _head(plan, profile, cluster, measured),
        _timeline(plan, timeline, measured),
        section("What limits the plan", "limits", _limits(plan, why)),
        section("Stages", "stages", _stages(plan, timeline)),
        section("Memory", "memory", _memory(plan, measured)),
        section("Why not", "why-not", _why_not(plan)),
        section("Predicted and measured", "check", _check(plan, measured)),
        section("What crosses the boundaries", "traffic", traffic_section(plan)),
        section("Layers", "layers", layer_section(plan, profile)),
        section("Where this comes from", "source", _source(plan)),
    ]
    return page(f"{plan.model.name}: {shape(plan)}", "\n".join(sections))


def page(title: str, body: str) -> str:
    """A whole HTML document around a body. The title is escaped, the body is taken as it is."""
    style, script = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{said(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>\n{style}</style></head>\n<body>\n{body}\n<script>\n{script}</script></body></html>\n"
    )


def timeline_figure(
    predicted: Timeline, measured: Timeline | None = None, *, limits: Sequence[int] = (), title: str, key: str
) -> str:
    """The picture in a frame that scrolls, with buttons; ``key`` must differ between the pictures of a page."""
    picture = timeline_svg(predicted, measured, limits=limits, title=title, key=key)
    buttons = "".join(
        f'<button type="button" value="{value}" aria-label="{label}">{sign}</button>'
        for value, label, sign in (("out", "zoom out", "−"), ("in", "zoom in", "+"), ("all", "show all", "all"))
    )
    return (
        f'<figure class="timeline"><div class="view" tabindex="0" role="group" aria-label="{said(title)}. {_KEYS}">'
        f"\n{picture}</div>\n"
        f'<div class="tools" hidden>{buttons}<output aria-live="polite">{_KEYS}</output></div></figure>'
    )


# the sections


def _head(plan: Plan, profile: Profile | None, cluster: Cluster | None, measured: CheckResult | None) -> str:
    (name, what, _), *others = head_rows(plan, profile, cluster)
    lines = "".join(f'<p class="dim">{said(label)}: {said(text)}</p>' for label, text, _ in others)
    links = (
        ("timeline", "timeline"),
        ("limits", "limits"),
        ("stages", "stages"),
        ("memory", "memory"),
        ("why-not", "why not"),
        ("check", "predicted and measured"),
        ("traffic", "boundaries"),
        ("layers", "layers"),
    )
    nav = "".join(f'<a href="#{key}">{text}</a>' for key, text in links)
    return (
        f"<header><h1>{said(name)}</h1><p>{said(shape(plan))}</p><p>{said(what)}</p>{lines}"
        f"{cards(_figures(plan, measured))}<nav>{nav}</nav></header>"
    )


def _figures(plan: Plan, measured: CheckResult | None) -> Iterator[tuple[str, str, str]]:
    """The cards at the top: what, number, and a word on it."""
    expected = plan.predicted
    found = measured.measured if measured else None
    yield "step, predicted", format_duration(expected.step_s), f"at best {format_duration(plan.lower_bound_s)}"
    if measured and found:
        yield "step, measured", format_duration(found.step_s), f"{format_percent(measured.error, sign=True)} off"
    yield "samples/s", f"{expected.samples_per_s:.1f}", f"measured {found.samples_per_s:.1f}" if found else "predicted"
    yield "idle", format_percent(expected.idle), f"{plan.depth} ranks"
    fullest = max(range(plan.depth), key=lambda rank: expected.peak_bytes[rank] / plan.memory_limit_bytes[rank])
    limit = format_bytes(plan.memory_limit_bytes[fullest])
    yield "fullest rank", format_bytes(expected.peak_bytes[fullest]), f"rank {fullest}, of {limit}"
    if measured:
        verdict = "passed" if measured.parity.passed else "FAILED"
        yield "parity", verdict, "losses and gradients against one process"


def _timeline(plan: Plan, timeline: Timeline, measured: CheckResult | None) -> str:
    title = f"One step of {plan.model.name}, {plan.schedule.name}"
    figure = timeline_figure(
        timeline, measured.timeline if measured else None, limits=plan.memory_limit_bytes, title=title, key="timeline"
    )
    lanes = "The upper lane of a rank is predicted, the lower one measured." if measured else "Predicted; not run yet."
    return section("Timeline", "timeline", f'<p class="dim">{lanes}</p>{figure}')


def _limits(plan: Plan, why: str) -> str:
    """What bounds the step, which ``why`` says too, and the plan's notes."""
    jitter_s = plan.predicted.jitter_s
    jitter = f" and {format_duration(jitter_s)} of jitter" if jitter_s else ""
    bounds = (
        f"The step is limited by {plan.limited_by}.",
        f"No plan of those that were searched can take less than {format_duration(plan.lower_bound_s)} a step; this "
        f"one takes {format_duration(plan.predicted.step_s - jitter_s)}, {format_percent(plan.gap)} more{jitter}.",
    )
    notes = (f"{note[:1].upper()}{note[1:]}." for note in plan.notes)
    return "".join(f"<p>{said(line)}</p>" for line in ((why,) if why else bounds) + tuple(notes))


def _stages(plan: Plan, timeline: Timeline) -> str:
    headers = ("stage", "rank", "layers", "", "forward", "backward", "optimizer", "weights", "work in a step", "idle")
    longest = max(timeline.work_s(rank) for rank in range(plan.depth)) or 1.0
    rows = []
    for stage in plan.stages:
        work_s = _work_s(timeline, stage)
        parts = [(name, seconds / longest) for name, seconds in work_s.items()]
        idle = format_percent(timeline.rank_idle(stage.rank))
        times = (stage.costs.forward_s, stage.costs.backward_s, stage.costs.optimizer_s)
        first = map(said, (str(stage.index), str(stage.rank), _layers(stage)))
        sums = (format_bytes(stage.costs.parameter_bytes), format_duration(sum(work_s.values())), idle)
        rows.append([*first, bar(parts), *map(said, (*map(format_duration, times), *sums))])
    return legend("FBWO" if plan.schedule.parsed().splits_backward else "FBO") + table(
        headers, rows, left=(2,), names=(2,)
    )


def _work_s(timeline: Timeline, stage: Stage) -> dict[str, float]:
    """Seconds of a step that a stage computes, by the letter of the operation; I counts as backward."""
    work = dict.fromkeys("FBWO", 0.0)
    for span in timeline.spans:
        if span.action.stage == stage.index:
            op = span.action.op.value
            work["B" if op == "I" else op] += span.end_s - span.start_s
    return work


def _layers(stage: Stage) -> str:
    count = len(stage.layers)
    ends = stage.layers[0] if count == 1 else f"{stage.layers[0]} … {stage.layers[-1]}"
    again = f", {len(stage.recompute)} recompute" if stage.recompute else ""
    return f"{ends} ({count}{again})"


class _Share(NamedTuple):
    """What a rank's memory holds, bytes."""

    weights: int
    gradients: int
    optimizer: int
    messages: int
    activations: int


def _share(plan: Plan, rank: int) -> _Share:
    """The parts of a rank's peak; activations and workspace are what the others leave of it."""
    own = [stage.costs for stage in plan.stages if stage.rank == rank]
    schedule = plan.schedule.parsed()
    weights = sum(
        copies(schedule, s.index) * s.costs.parameter_bytes - s.costs.shared_bytes + s.costs.buffer_bytes
        for s in plan.stages
        if s.rank == rank
    )
    gradients, optimizer = sum(cost.gradient_bytes for cost in own), sum(cost.optimizer_bytes for cost in own)
    crossings = kept(schedule)
    messages = sum(s.costs.buffers_bytes(*crossings[s.index]) for s in plan.stages if s.rank == rank)
    rest = plan.predicted.peak_bytes[rank] - weights - gradients - optimizer - messages
    return _Share(weights, gradients, optimizer, messages, max(0, rest))


def _memory(plan: Plan, measured: CheckResult | None) -> str:
    headers = ("rank", "", *_Share._fields, "peak", "measured", "limit")
    limits, peaks = plan.memory_limit_bytes[: plan.depth], plan.predicted.peak_bytes
    scale = max(peaks) if max(limits) > 4 * max(peaks) else max(*limits, *peaks)
    rows = []
    for rank in range(plan.depth):
        share, peak, limit = _share(plan, rank), plan.predicted.peak_bytes[rank], plan.memory_limit_bytes[rank]
        found = format_bytes(measured.measured.peak_bytes[rank]) if measured else "–"
        parts = [(kind, size / max(scale, 1)) for kind, size in zip("WBOMF", share, strict=True)]
        numbers = (*map(format_bytes, share), format_bytes(peak), found, format_bytes(limit))
        rows.append([str(rank), bar(parts), *map(said, numbers)])
    kinds = {"W": "weights", "B": "gradients", "O": "optimizer", "M": "messages", "F": "activations and workspace"}
    return legend(kinds) + table(headers, rows)


def _why_not(plan: Plan) -> str:
    if not plan.rejected:
        return "<p>Nothing else was possible.</p>"
    slowest = max([plan.predicted.step_s, *(other.step_s or 0.0 for other in plan.rejected)])
    chosen = [said(text) for text in ("this plan", format_duration(plan.predicted.step_s))]
    chosen += [said(format_percent(plan.predicted.idle)), said(format_bytes(max(plan.predicted.peak_bytes))), ""]
    rows = [[chosen[0], bar([("F", plan.predicted.step_s / slowest)]), *chosen[1:]]]
    for other, (what, *cells) in zip(plan.rejected, rejected_rows(plan.rejected), strict=True):
        length = bar([("M", other.step_s / slowest)]) if other.step_s else ""
        rows.append([said(what), length, *map(said, cells)])
    return table(("instead", "", "step", "idle", "peak", "why not"), rows, left=(5,), wraps=(0, 5))


def _check(plan: Plan, measured: CheckResult | None) -> str:
    if measured is None:
        return "<p>Not run yet: <code>autopipe check plan.json</code> measures it.</p>"
    result = rows_table(("", "predicted", "measured", "error", ""), check_rows(measured, plan), left=(0, 4))
    mark = "good" if measured.parity.passed else "bad"
    (_, first), *others = parity_rows(measured)
    lines = "".join(f"<p>{said(f'{label}: {text}' if label else text)}</p>" for label, text in others)
    return f'{result}<p class="{mark}">parity {said(first)}</p>{lines}'


def _source(plan: Plan) -> str:
    rows = [
        ("model", f"{plan.model.path or plan.model.name}:{plan.model.builder}", plan.model.digest or "–"),
        ("profile", plan.profile.path or "–", plan.profile.digest),
        ("cluster", plan.cluster.path or "–", plan.cluster.digest),
        ("plan", "–", plan.digest),
        *((name, version, "–") for name, version in plan.provenance.items()),
        ("report", __version__, "–"),
    ]
    return rows_table(("", "file or version", "SHA-256"), rows, left=(0, 1, 2))
