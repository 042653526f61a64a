"""A Plan: who runs what, when. Plain data with a file of its own (core/files.py); nothing in it is executed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopipe.core.cluster import Link
from autopipe.core.errors import UsageError
from autopipe.core.optimizer import Optimizer
from autopipe.core.profile import Edge, content_digest
from autopipe.core.reduction import MEAN, Reduction
from autopipe.core.schedule import Action, Schedule
from autopipe.core.stage import StageCost
from autopipe.core.validation import validate

if TYPE_CHECKING:
    from autopipe.runtime.running.pipeline import Pipeline


PLANNED_ONLY = "stages with unequal replicas are planned, not run: autopipe plan without --unequal-replicas"
"""What a plan of such stages says, and what refuses to run it."""


@dataclass(frozen=True)
class ModelRef:
    """The model file: its path relative to the plan's folder, the builder in it, and the SHA-256 of its bytes.

    ``path`` is None for a model that was handed over in memory, or known by its profile only.
    """

    name: str
    path: str | None = None
    builder: str = "build_model"
    digest: str | None = None


@dataclass(frozen=True)
class FileRef:
    """A profile or cluster that the plan was made from. ``path`` is None when it was never a file."""

    digest: str
    path: str | None = None


@dataclass(frozen=True)
class ScheduleTable:
    """A Schedule as the file holds it: actions as text, a list a rank."""

    name: str
    placement: tuple[int, ...]
    order: tuple[tuple[str, ...], ...]
    executor: str = "torch"
    parts: tuple[int, ...] = ()
    weights: str = "flush"

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleTable:
        """The table of a schedule."""
        order = tuple(tuple(map(str, row)) for row in schedule.order)
        made = cls(schedule.name, schedule.placement, order, schedule.executor, schedule.parts, schedule.weights)
        made.__dict__["_parsed"] = schedule  # what the text says, without reading a quarter of a million actions again
        return made

    def parsed(self) -> Schedule:
        """The schedule again. Raises ScheduleError for text that is not an action."""
        return self._parsed

    @cached_property
    def _parsed(self) -> Schedule:
        order = tuple(tuple(Action.parse(text) for text in row) for row in self.order)
        return Schedule(self.name, self.placement, order, self.executor, self.parts, self.weights)


@dataclass(frozen=True)
class Stage:
    """One stage: the layers ``start`` to ``stop`` (excluded), by number and name, its rank, cost and boundaries.

    ``layers`` are the names, ``modules`` all module paths in them. ``recompute`` names the layers that keep only
    their inputs. ``receives`` and ``sends`` list every value that crosses, in the order on the wire. ``replicas`` of
    its own share out the rows of every micro-batch, and ``costs`` are those of one of them.
    """

    index: int
    rank: int
    start: int
    stop: int
    layers: tuple[str, ...]
    modules: tuple[str, ...]
    costs: StageCost
    receives: tuple[Edge, ...] = ()
    sends: tuple[Edge, ...] = ()
    recompute: tuple[str, ...] = ()
    replicas: int = 1


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that more than one stage holds."""

    name: str
    stages: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Prediction:
    """What the plan is expected to do. ``idle`` = 1 − work / (ranks × step); bytes are per rank.

    ``jitter_s`` is the part of ``step_s`` that equal actions add by not taking equal times (autopipe/jitter.py); the
    rest is the timeline's step, in which each takes its median.
    """

    step_s: float
    samples_per_s: float
    idle: float
    peak_bytes: tuple[int, ...]
    jitter_s: float = 0.0


SAME_CUTS = "the same cuts"
"""The reason of a way that comes to the plan itself."""


@dataclass(frozen=True)
class Rejected:
    """Another way, and why it was not chosen. Numbers are None where it cannot run at all.

    ``also`` are further ways that come to the very same plan.
    """

    what: str
    reason: str
    step_s: float | None = None
    idle: float | None = None
    peak_bytes: int | None = None
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All ways that come to this plan."""
        return (self.what, *self.also)

    @property
    def named(self) -> str:
        """All of them in one line; an end that neighbours share stands once: ``equal layers / GPipe's split, 1F1B``."""
        parts = (name.rpartition(", ") for name in self.names)
        runs = itertools.groupby(parts, key=lambda part: part[1:])
        return " / ".join(" / ".join(part[0] for part in run) + "".join(end) for end, run in runs)


@dataclass(frozen=True)
class Plan:
    """Everything that running the plan needs, and what was expected of it.

    ``global_batch = micro_batch × micro_batches × replicas``. ``hops[s]`` is the link from stage s to s + 1, None
    inside a rank. ``memory_limit_bytes`` is what a rank may use, headroom taken off. ``lower_bound_s`` holds for
    every plan in the space that was searched; ``gap`` = step / bound − 1 without the jitter. ``reduction`` is how the
    losses of micro-batches add up. ``master_weights`` and ``sharded_optimizer`` say that the optimizer keeps its
    state in float32, and that the replicas share it out. ``devices`` are the cluster's that the ranks run on, by
    their numbers, ascending; () stands for the first ones. Parts that contradict each other raise UsageError, and a
    table that cannot run ScheduleError.
    """

    model: ModelRef
    profile: FileRef
    cluster: FileRef
    device: str
    dtype: str
    threads: int
    optimizer: str
    global_batch: int
    micro_batch: int
    micro_batches: int
    depth: int
    replicas: int
    stages_per_rank: int
    schedule: ScheduleTable
    stages: tuple[Stage, ...]
    hops: tuple[Link | None, ...]
    ties: tuple[TiedParameter, ...]
    overhead_s: float
    memory_limit_bytes: tuple[int, ...]
    predicted: Prediction
    lower_bound_s: float
    gap: float
    limited_by: str
    noise: float = 0.0
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    reduction: Reduction = MEAN
    master_weights: bool = False
    sharded_optimizer: bool = False
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("micro_batch", "micro_batches", "replicas", "depth", "stages_per_rank", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"plan: {name} is {getattr(self, name)}, it must be 1 or more")
        product = self.micro_batch * self.micro_batches * self.replicas
        if product != self.global_batch:
            raise UsageError(
                f"plan: global_batch is {self.global_batch}, but micro_batch × micro_batches × replicas = {product}"
            )
        schedule = self.schedule.parsed()
        self._check_stages(schedule)
        if len(self.schedule.order) != self.depth:
            raise UsageError(f"plan: depth is {self.depth}, but the schedule has {len(self.schedule.order)} ranks")
        if self.devices and (sorted({*self.devices}) != [*self.devices] or len(self.devices) != self.processes):
            raise UsageError(f"plan: devices {self.devices} must be {self.processes} numbers that ascend")
        if len(self.memory_limit_bytes) < self.depth or len(self.predicted.peak_bytes) < self.depth:
            raise UsageError(f"plan: {self.depth} ranks, but a memory limit or a predicted peak is missing for some")
        validate(schedule)
        if schedule.per_update != self.micro_batches:
            raise UsageError(
                f"plan: micro_batches is {self.micro_batches}, but the schedule has {schedule.per_update} an update"
            )

    def _check_stages(self, schedule: Schedule) -> None:
        if self.unequal and (self.replicas > 1 or len(self.stages) != self.depth):
            raise UsageError("plan: stages with replicas of their own need one stage a rank, and no other replicas")
        if any(stage.replicas < 1 or self.micro_batch % stage.replicas for stage in self.stages):
            raise UsageError(f"plan: a stage's replicas must divide the micro-batch of {self.micro_batch}")
        layers = [(stage.start, stage.stop) for stage in self.parts]
        if [a for a, _ in layers] != [0, *(b for _, b in layers[:-1])] or any(a >= b for a, b in layers):
            raise UsageError(f"plan: the stages' layers {layers} do not follow one another without gaps")
        if tuple(stage.rank for stage in self.stages) != self.schedule.placement:
            raise UsageError("plan: the stages and their ranks are not those of the schedule's placement")
        empty = next((stage.index for stage in self.stages if not stage.layers), None)
        if empty is not None:
            raise UsageError(f"plan: stage {empty} has no layers: every stage needs one")
        if len(self.hops) != len(self.stages) - 1:
            raise UsageError(f"plan: {len(self.stages)} stages need {len(self.stages) - 1} hops, not {len(self.hops)}")
        if [(s.start, s.stop) for s in self.stages] != [layers[p] for p in schedule.part_of if p < len(layers)]:
            raise UsageError("plan: the stages that are the same part of the model do not hold the same layers")

    @property
    def parts(self) -> tuple[Stage, ...]:
        """The stages of one replica of the model: all, or in a two-way pipeline the first half."""
        parts = self.schedule.parts
        return self.stages[: max(parts) + 1] if parts else self.stages

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple(stage.start for stage in self.parts[1:])

    @property
    def recompute(self) -> tuple[int, ...]:
        """The numbers of the layers that recompute their activations, of one replica of the model."""
        return tuple(
            stage.start + place
            for stage in self.parts
            for place, layer in enumerate(stage.layers)
            if layer in stage.recompute
        )

    @property
    def unequal(self) -> bool:
        """Whether stages have replicas of their own."""
        return any(stage.replicas > 1 for stage in self.stages)

    @property
    def processes(self) -> int:
        """How many devices it uses."""
        return sum(stage.replicas for stage in self.stages) if self.unequal else self.depth * self.replicas

    @property
    def update(self) -> Optimizer:
        """The optimizer of each replica."""
        return Optimizer(self.optimizer, self.master_weights, self.replicas if self.sharded_optimizer else 1)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan's content."""
        return content_digest(asdict(self))

    def save(self, path: str | Path) -> None:
        """Write plan.json, whole or not at all. Raises FileError where it cannot be written."""
        from autopipe.core import files

        files.write(self, path)

    def build(self, model: Any, loss_fn: Any, **options: Any) -> Pipeline:
        """This rank's part of the pipeline, under torchrun; see runtime.pipeline.Pipeline."""
        from autopipe.runtime.running.pipeline import Pipeline

        return Pipeline(self, model, loss_fn, **options)

    def __str__(self) -> str:
        from autopipe.report.terminal import plan_text

        return plan_text(self)
