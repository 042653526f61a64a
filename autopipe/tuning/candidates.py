"""What is worth a trial: the best plan of every depth, micro-batch size and schedule, two baselines, and neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.baselines import BASELINES
from autopipe.core.errors import NoPlanFits, UsageError
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile

Search = Callable[..., Plan]
"""``autopipe.plan`` with everything given but the choices: depths, micro_batches, schedules, pins."""

EQUAL = "equal layers"
ALONE = "no pipeline"
"""The whole model on one device."""
COPIES = "data parallelism"
"""A copy of the whole model on each of several devices."""


@dataclass(frozen=True)
class Candidate:
    """A plan that may be tried, and why."""

    plan: Plan
    why: str

    @property
    def name(self) -> str:
        """What tells it from another: the same in every run."""
        return plan_name(self.plan)


def plan_name(plan: Plan) -> str:
    """``1F1B, 2 stages cut at 6, micro-batch 4``."""
    again = sum(len(stage.recompute) for stage in plan.stages)
    recompute = f", recomputation in {again} layers" if again else ""
    replicas = f", {plan.replicas} replicas" if plan.replicas > 1 else ""
    return f"{_outline(plan)}, micro-batch {plan.micro_batch}{replicas}{recompute}"


def _outline(plan: Plan) -> str:
    if plan.depth == 1:
        return _unpiped(plan)
    return f"{plan.schedule.name}, {len(plan.parts)} stages cut at {' '.join(map(str, plan.cuts))}"


def _unpiped(plan: Plan) -> str:
    return COPIES if plan.replicas > 1 else ALONE


def candidates(
    search: Search, *, depths: Sequence[int], micro_batches: Sequence[int], schedules: Sequence[str]
) -> list[Candidate]:
    """The best plan of each combination that has one, fastest first; the first is the search's own answer."""
    found = [Candidate(search(), "predicted best")]
    for micro_batch in micro_batches:
        size = {"micro_batches": (micro_batch,)}
        found += _tried(search, ALONE, depths=(1,), replicas=(1,), **size)
        found += _tried(search, COPIES, depths=(1,), replicas=range(2, max(depths) + 1), **size)
        for depth in depths:
            for schedule in schedules if depth > 1 else ():
                why = f"best of {schedule}, {depth} ranks, micro-batch {micro_batch}"
                found += _tried(search, why, depths=(depth,), schedules=(schedule,), **size)
    found.sort(key=lambda each: (each.plan.predicted.step_s, each.why != "predicted best"))
    return distinct(found)


def equal_layers(search: Search, profile: Profile, like: Plan) -> list[Candidate]:
    """The same depth, schedule and micro-batch with equally many layers a stage; nothing where that cannot be cut."""
    cuts = BASELINES[EQUAL](profile, len(like.parts))
    return [] if cuts is None or like.depth == 1 else _cut(search, profile, like, cuts, EQUAL)


def reason(candidate: Candidate, profile: Profile) -> str:
    """Why a plan is tried: as a baseline, where it is one whatever it was made for."""
    plan = candidate.plan
    if plan.depth == 1:
        return _unpiped(plan)
    return EQUAL if plan.cuts == BASELINES[EQUAL](profile, len(plan.parts)) else candidate.why


def neighbours(search: Search, profile: Profile, of: Plan) -> Iterator[Candidate]:
    """A plan with one of its cuts moved to the next place where the model can be cut."""
    legal = (0, *profile.legal_cuts(), len(profile.layers))
    for index, cut in enumerate(of.cuts):
        at = legal.index(cut)
        for moved in (legal[at - 1], legal[at + 1]):
            cuts = (*of.cuts[:index], moved, *of.cuts[index + 1 :])
            if all(a < b for a, b in zip((0, *cuts), (*cuts, len(profile.layers)), strict=True)):
                yield from _cut(search, profile, of, cuts, f"neighbour of {plan_name(of)}")


def _cut(search: Search, profile: Profile, like: Plan, cuts: Sequence[int], why: str) -> list[Candidate]:
    pins = {layer.name: sum(cut <= number for cut in cuts) for number, layer in enumerate(profile.layers)}
    shape = {
        "depths": (like.depth,),
        "replicas": (like.replicas,),
        "micro_batches": (like.micro_batch,),
        "schedules": (like.schedule.name,),
    }
    return _tried(search, why, pins=pins, **shape)


def _tried(search: Search, why: str, **choices: object) -> list[Candidate]:
    try:
        return [Candidate(search(**choices), why)]
    except (NoPlanFits, UsageError):  # UsageError: a schedule that this shape cannot run
        return []


def distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """Each plan once, by name."""
    return list({each.name: each for each in reversed(found)}.values())[::-1]
