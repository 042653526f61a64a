"""One schedule on stages whose seconds are given: what ``autopipe schedule`` shows.

The unit of memory is one micro-batch's activations of a rank, shared equally by its stages and held from F to B or W.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import autopipe.synthesis  # noqa: F401  (registers all schedules)
from autopipe.core import files
from autopipe.core.cluster import Link
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.schedule import Op, Schedule, Shape, StageMemory, StageTimes, kind
from autopipe.core.stage import StageCost
from autopipe.core.stage_seconds import StageSeconds
from autopipe.core.table_csv import read_csv
from autopipe.core.timeline import Timeline
from autopipe.core.units import parse_duration
from autopipe.core.validation import validate
from autopipe.ordering.bounds import makespan_bound_s
from autopipe.simulate import simulate

_ENDLESS = 1e300
"""Bytes a second of a link on which only its latency counts."""


@dataclass(frozen=True)
class Explored:
    """A schedule and what it does.

    ``stage_time_s`` is the longest time of a rank from its first start to its end. ``idle`` = 1 − work / (ranks ×
    makespan); ``stage_idle`` = 1 − the longest rank's work / ``stage_time_s``. ``lower_bound_s`` holds for every
    order of these stages, in the memory cap where there is one.
    """

    schedule: Schedule
    timeline: Timeline
    stage_time_s: float
    stage_idle: float
    peak_in_flight: tuple[float, ...]
    lower_bound_s: float

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return self.timeline.step_s

    @property
    def gap(self) -> float:
        """makespan / bound − 1."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    def to_json(self) -> str:
        """What ``--json`` prints."""
        content = {
            "schedule": self.schedule.name,
            "makespan_s": self.makespan_s,
            "stage_time_s": self.stage_time_s,
            "idle": self.timeline.idle,
            "stage_idle": self.stage_idle,
            "peak_in_flight": list(self.peak_in_flight),
            "lower_bound_s": self.lower_bound_s,
            "placement": list(self.schedule.placement),
            "order": [[str(action) for action in row] for row in self.schedule.order],
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def stage_seconds(
    name: str,
    ranks: int,
    stages: int | None,
    durations: tuple[str | None, str | None, str | None, str | None],
    path: Path | None,
) -> StageSeconds:
    """Seconds from a file of them, or from durations of F, I, W (all needed) and a transfer, as text, for all stages.

    Where ``stages`` is not said it is the file's number, or the least that the schedule takes. Raises UsageError for
    both or neither, FileError for a bad file.
    """
    if path is not None:
        if any(durations):
            raise UsageError("--costs gives all seconds: leave out --forward, --input-grad, --weight-grad, --transfer")
        seconds = files.read(path, StageSeconds)
        if stages not in (None, seconds.stages):
            raise UsageError(f"{path} has {seconds.stages} stages, --stages says {stages}: leave --stages out")
        return seconds
    *work, transfer = durations
    given = [parse_duration(text) for text in work if text is not None]
    if len(given) < len(work):
        raise UsageError("seconds are missing: give --forward, --input-grad and --weight-grad, or --costs FILE")
    forward_s, input_grad_s, weight_grad_s = given
    return StageSeconds.equal(
        _least_stages(name, ranks) if stages is None else stages,
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        transfer_s=parse_duration(transfer) if transfer else 0.0,
    )


def _least_stages(name: str, ranks: int) -> int:
    """The least number of stages that a schedule takes, or that a table has."""
    if name.endswith(".csv"):
        return read_csv(name).stages
    return ranks * (kind(name).stages_per_rank or (1,))[0]


def explore(
    name: str, costs: StageSeconds, *, ranks: int, micro_batches: int, memory_cap: float | None = None
) -> Explored:
    """A schedule by name, or the table of a ``.csv`` file, on these stages; transfers inside a rank are free.

    ``memory_cap`` is what a rank may hold. Of several placements that a schedule takes the best one is shown. Raises
    UsageError for a shape that the schedule does not take, NoPlanFits where it holds more than the cap.
    """
    times = costs.times()
    if name.endswith(".csv"):
        read = _read(name, costs, ranks, micro_batches)
        tables = [(read, _shape(read.placement, costs, ranks, micro_batches, memory_cap))]
    else:
        shapes = (_shape(p, costs, ranks, micro_batches, memory_cap) for p in _placements(name, costs.stages, ranks))
        tables = [(kind(name).table(shape, times), shape) for shape in shapes]
    for table, _ in tables:
        validate(table)
        _check_cap(table, peak_in_flight(table), memory_cap)
    return min((examine(table, shape, times) for table, shape in tables), key=lambda found: found.makespan_s)


def examine(table: Schedule, shape: Shape, times: Sequence[StageTimes]) -> Explored:
    """What a table does on stages whose seconds, and those of the hops, are given."""
    hops = [Link(hop, _ENDLESS) if hop else None for hop in shape.hops_s or (0.0,) * (shape.stages - 1)]
    line = simulate(table, [_cost(t) for t in times], hops)
    line = replace(line, spans=tuple(span for span in line.spans if span.action.op is not Op.O))
    stage_time_s = max(_stage_time_s(line, rank) for rank in range(table.ranks))
    longest_s = max(line.work_s(rank) for rank in range(table.ranks))
    return Explored(
        schedule=table,
        timeline=line,
        stage_time_s=stage_time_s,
        stage_idle=1 - longest_s / stage_time_s if stage_time_s else 0.0,
        peak_in_flight=peak_in_flight(table),
        lower_bound_s=min(line.step_s, makespan_bound_s(shape, times, shape.memory)),
    )


def peak_in_flight(table: Schedule) -> tuple[float, ...]:
    """The most micro-batches' activations that each rank holds, one for all its stages together."""
    peaks = []
    for rank, row in enumerate(table.order):
        held = most = 0
        for action in row:
            held += (action.op is Op.F) - (action.op in (Op.B, Op.W))
            most = max(most, held)
        peaks.append(most / table.placement.count(rank))
    return tuple(peaks)


def _shape(placement: tuple[int, ...], costs: StageSeconds, ranks: int, micro_batches: int, cap: float | None) -> Shape:
    seconds = costs.transfer_s or (0.0,) * (costs.stages - 1)
    hops_s = tuple(0.0 if a == b else hop for (a, b), hop in zip(pairwise(placement), seconds, strict=True))
    shape = Shape(ranks, micro_batches, placement, hops_s)
    return shape if cap is None else replace(shape, memory=StageMemory.of(shape, cap))


def _placements(name: str, stages: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """How a schedule by name may place the stages."""
    chosen = kind(name)
    number, rest = divmod(stages, ranks)
    if rest or not number:
        numbers = chosen.stages_per_rank or (1, 2, 4)
        wanted = " or ".join(str(number * ranks) for number in numbers)
        raise UsageError(f"{stages} stages cannot be shared equally by {ranks} ranks: use --stages {wanted}")
    return chosen.placements(ranks, number)


def _read(path: str, costs: StageSeconds, ranks: int, micro_batches: int) -> Schedule:
    table = read_csv(path)
    found, wanted = (table.ranks, table.stages, table.micro_batches), (ranks, costs.stages, micro_batches)
    if found != wanted:
        raise UsageError(
            f"{path} is for {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches, not {wanted[0]}, "
            f"{wanted[1]} and {wanted[2]}: change --ranks, --stages and --micro-batches"
        )
    return table


def _cost(t: StageTimes) -> StageCost:
    """A stage that sends one byte, so that a hop takes its latency."""
    return StageCost(
        forward_s=t.forward_s,
        backward_s=t.backward_s,
        input_grad_s=t.input_grad_s,
        weight_grad_s=t.weight_grad_s,
        optimizer_s=0.0,
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        buffer_bytes=0,
        held_after_forward_bytes=0,
        held_after_input_grad_bytes=0,
        workspace_bytes=0,
        send_bytes=1,
        receive_grad_bytes=1,
    )


def _stage_time_s(line: Timeline, rank: int) -> float:
    own = [span for span in line.spans if span.rank == rank]
    return own[-1].end_s - own[0].start_s


def _check_cap(table: Schedule, peaks: Sequence[float], cap: float | None) -> None:
    over = [rank for rank, peak in enumerate(peaks) if cap is not None and peak > cap * (1 + 1e-9)]
    if over:
        rank = max(over, key=lambda r: peaks[r])
        raise NoPlanFits(
            f"{table.name} holds {peaks[rank]:g} micro-batches' activations on rank {rank}, the cap is {cap:g}. Try "
            f"--memory-cap {peaks[rank]:g}, or the schedule Synthesized, which keeps to a cap"
        )
