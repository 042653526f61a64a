"""What the tables of a report say, as text: the terminal and the HTML page show the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from autopipe.core.cluster import Cluster, Link
from autopipe.core.paths import seen
from autopipe.core.plan import Plan, Rejected, Stage
from autopipe.core.profile import Profile
from autopipe.core.result import CheckResult, Rehearsal
from autopipe.core.units import format_bandwidth, format_bytes, format_count, format_duration, format_percent, many
from autopipe.core.versions import delays

NONE = "–"
"""Where there is no number."""
LAYERS = 28
"""Columns of a terminal that the name of a layer, or the first and last of a stage, may take."""
Row = Sequence[str]


def clean(text: str) -> str:
    """The text on one line, with everything that does not print as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def end_of(text: str, width: int) -> str:
    """The text, or its end where it is wider: the end of a module path tells layers apart."""
    return text if len(text) <= width else "…" + text[1 - width :]


def layer_range(stage: Stage, width: int = LAYERS) -> str:
    """First and last layer of a stage; what the last one's path shares with the first one's is left out."""
    first, last = stage.layers[0], stage.layers[-1]
    if len(stage.layers) == 1:
        return end_of(first, width)
    start, end = first.split("."), last.split(".")
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(start, end, strict=False))))
    last = end_of(".".join(end[shared:]), width // 2)
    return f"{end_of(first, width - 3 - len(last))} … {last}"


def link_text(link: Link) -> str:
    """``12.0 GB/s, 14.0 µs a hop``."""
    return f"{format_bandwidth(link.bytes_per_s)}, {format_duration(link.latency_s)} a hop"


def head_rows(
    plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None, folder: Path | None = None
) -> list[Row]:
    """What was planned, for what devices, from what profile: label, text, and the file's path or nothing.

    ``folder`` is where the plan's file lies: with it, paths are those of the current folder.
    """
    layers = many(plan.stages[-1].stop, "layer")
    size = f"{format_count(profile.parameters)} parameters" if profile else f"{_weights(plan)} of weights"
    model, links, times = (_path(ref.path, folder) for ref in (plan.model, plan.cluster, plan.profile))
    source = f"{model}:{plan.model.builder}" if model else ""
    sizes = " ".join(map(str, profile.micro_batches)) if profile else ""
    measured = f"{layers} × micro-batch {sizes}" if profile else f"digest {plan.profile.digest[:12]}"
    noise = f" · noise {format_percent(plan.noise)}" if plan.noise else ""
    return [
        (plan.model.name, f"{layers} · {size} · {plan.dtype}", source),
        ("cluster", _cluster_line(plan, cluster), links),
        ("profile", f"{measured}{noise}", times),
    ]


def _path(path: str | None, folder: Path | None) -> str:
    return path or "" if path is None or folder is None else seen(path, folder)


def _weights(plan: Plan) -> str:
    parts = len(plan.parts)
    twice = sum(tie.bytes * (sum(stage < parts for stage in tie.stages) - 1) for tie in plan.ties)
    return format_bytes(sum(stage.costs.parameter_bytes for stage in plan.parts) - twice)


def _cluster_line(plan: Plan, cluster: Cluster | None) -> str:
    limits = sorted({format_bytes(limit): limit for limit in plan.memory_limit_bytes}.items(), key=lambda item: item[1])
    usable = " to ".join(text for text, _ in (limits if len(limits) < 3 else (limits[0], limits[-1])))
    hops = [hop for hop in plan.hops if hop]
    slowest = f" · {link_text(min(hops, key=lambda hop: hop.bytes_per_s))}" if hops else ""
    origin = f", {cluster.origin}" if cluster else ""
    return f"{plan.processes} × {plan.device} ({usable} usable){slowest}{origin}"


def shape(plan: Plan) -> str:
    """``1F1B · 2 stages · 4 micro-batches of 2 · global batch 8``."""
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    parts = [
        plan.schedule.name,
        many(len(plan.parts), "stage"),
        many(plan.replicas, "replica") if plan.replicas > 1 else "",
        f"{' '.join(str(stage.replicas) for stage in plan.stages)} replicas" if plan.unequal else "",
        f"{many(plan.micro_batches, 'micro-batch')} of {plan.micro_batch}",
        f"global batch {plan.global_batch}",
        f"recomputation in {many(recomputed, 'layer')}" if recomputed else "",
        "master weights" if plan.master_weights else "",
        "shared optimizer" if plan.update.shards > 1 else "",
    ]
    return " · ".join(filter(None, parts))


def rejected_rows(rejected: Sequence[Rejected]) -> list[Row]:
    """Other ways: what, step, idle, peak, and why not."""
    return [
        (
            other.named,
            NONE if other.step_s is None else format_duration(other.step_s),
            NONE if other.idle is None else format_percent(other.idle),
            NONE if other.peak_bytes is None else format_bytes(other.peak_bytes),
            other.reason,
        )
        for other in rejected
    ]


def check_rows(result: CheckResult, plan: Plan | None) -> list[Row]:
    """Predicted against measured: step, stages (their predicted times are the plan's), memory; with error and note."""
    return [*_step_rows(result), *_stage_rows(result, plan), *_memory_rows(result), *_staleness_rows(result, plan)]


def _staleness_rows(result: CheckResult, plan: Plan | None) -> Iterator[Row]:
    """How many updates old the weights of an asynchronous plan were when a forward met them."""
    planned = delays(plan.schedule.parsed()) if plan else ()
    for stage, age in enumerate(result.staleness):
        before = f"{planned[stage]:.3g} updates" if planned else NONE
        yield (f"stage {stage} staleness", before, f"{age:.3g} updates", "", "")


def error(predicted: float, measured: float) -> str:
    """How far the measured value is off the predicted one, as text."""
    return format_percent(measured / predicted - 1, sign=True) if predicted else NONE


def _step_rows(result: CheckResult) -> list[Row]:
    predicted, measured = result.predicted, result.measured
    spread = f"spread {format_percent(measured.spread)}"
    step = format_percent(result.error, sign=True)
    rates = (f"{predicted.samples_per_s:.1f}", f"{measured.samples_per_s:.1f}")
    return [
        ("step", format_duration(predicted.step_s), format_duration(measured.step_s), step, spread),
        ("samples/s", *rates, error(predicted.samples_per_s, measured.samples_per_s), ""),
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
        return (what, NONE, format_duration(measured), NONE, "")
    return (what, format_duration(predicted), format_duration(measured), error(predicted, measured), "")


def _memory_rows(result: CheckResult) -> list[Row]:
    resident = result.measured.resident_bytes
    return [
        (
            f"rank {rank} peak memory",
            format_bytes(before),
            format_bytes(after),
            error(before, after),
            f"process {format_bytes(resident[rank])}" if rank < len(resident) else "",
        )
        for rank, (before, after) in enumerate(
            zip(result.predicted.peak_bytes, result.measured.peak_bytes, strict=True)
        )
    ]


def rehearsal_rows(result: Rehearsal) -> list[Row]:
    """The step, and how long each rank is idle in it."""
    before, after = result.predicted, result.measured
    seconds = (format_duration(before.step_s), format_duration(result.step_s))
    spread = f"spread {format_percent(result.spread)}"
    rows: list[Row] = [("step", *seconds, format_percent(result.error, sign=True), spread)]
    for rank in range(before.ranks):
        idle = (format_percent(before.rank_idle(rank)), format_percent(after.rank_idle(rank)))
        rows.append((f"rank {rank} idle", *idle, "", ""))
    return rows


def parity_rows(result: CheckResult) -> list[Row]:
    """Whether losses and gradients are those of one process, and notes on the run: label and text."""
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
