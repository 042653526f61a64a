"""What others would do: a rule for the cuts (autopipe/baselines) and a known schedule, and the step of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopipe.baselines import BASELINES
from autopipe.core.cluster import Cluster
from autopipe.core.errors import UsageError
from autopipe.core.profile import Profile
from autopipe.core.schedule import Kind, Shape, StageTimes, kinds
from autopipe.planning.cases import Case
from autopipe.planning.outcome import Outcome, outcome
from autopipe.planning.ranges import Ranges
from autopipe.planning.remaking import shape_for
from autopipe.planning.setting import Setting
from autopipe.planning.space import SEVERAL
from autopipe.synthesis import NAME


class Job(NamedTuple):
    """What is planned: ``memory`` bytes on each of ``ranks``, micro-batches of a size, layers that may recompute."""

    name: str
    profile: Profile
    cluster: Cluster
    ranks: int
    micro_batch: int
    micro_batches: int
    memory: int
    recompute: str

    @property
    def setting(self) -> Setting:
        """What the search shares."""
        limits = (self.memory,) * self.ranks
        return Setting(self.profile, self.cluster, self.profile.optimizer, limits, {})


class Way(NamedTuple):
    """A rule with a schedule, and its step.

    ``published``: in the order that the schedule has for equal stages, as its authors give it. Else the order was made
    again for these very stages, their links and their memory, which takes list scheduling as in autopipe/ordering.
    """

    rule: str
    schedule: str
    stages_per_rank: int
    published: bool
    step_s: float

    @property
    def few(self) -> bool:
        """Whether a rank has one or two stages, as in the papers that the schedules come from."""
        return self.stages_per_rank <= 2


def ways(job: Job) -> Iterator[Way]:
    """Every rule with every known schedule that fits."""
    ranges = Ranges.of(job.profile, job.micro_batch, optimizer=job.setting.optimizer)
    for kind in kinds("torch"):
        for number in kind.stages_per_rank or SEVERAL if kind.name != NAME else ():
            placement = kind.place(job.ranks, number)
            stages = len(placement)
            if stages > ranges.pieces or kind.refuses(Shape(job.ranks, job.micro_batches, placement)):
                continue
            rules = ("none", "auto") if job.recompute == "auto" else (job.recompute,)
            cases = [_case(job, ranges, kind, number, rule) for rule in rules]
            for name, rule in BASELINES.items():
                cuts = rule(job.profile, stages)
                if cuts is None:
                    continue
                for published in (True, False) if kind.looks_at_times else (True,):
                    step_s = min(_step(case, kind, ranges.places(cuts), published) for case in cases)
                    if step_s < float("inf"):
                        yield Way(name, kind.name, number, published, step_s)


def _case(job: Job, ranges: Ranges, kind: Kind, number: int, recompute: str) -> Case:
    stages = number * job.ranks
    table = kind.schedule(job.ranks, job.micro_batches, stages_per_rank=number, times=[ranges.times(stages)] * stages)
    return Case.of(job.setting, ranges, table, job.micro_batch, recompute)


def _step(case: Case, kind: Kind, positions: Sequence[int], published: bool) -> float:
    """The step of a split, with the order for equal stages or for these; infinite where it does not fit."""
    splits = any(row.splits for row in case.outline.rows)
    if splits and not all(layer.can_split_backward for layer in case.setting.profile.layers):
        return float("inf")
    found: Outcome | None = outcome(case, positions)
    if found and not published:
        remade = _remade(case, kind, found)
        found = outcome(remade, positions) if remade else None
    return found.step_s if found and found.over_limit() is None else float("inf")


def _remade(case: Case, kind: Kind, found: Outcome) -> Case | None:
    overhead_s = case.setting.profile.overhead_s
    times = [StageTimes(*(seconds + overhead_s for seconds in cost.times)) for cost in found.costs]
    try:
        return case.ordered(kind.table(shape_for(case, found.costs), times))
    except UsageError:
        return None
