"""Trials, one after another: what to try next, run it, write it down, learn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopipe.core import files
from autopipe.core.errors import AutopipeError
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile
from autopipe.core.units import format_duration
from autopipe.tuning.candidates import ALONE, EQUAL, Candidate, Search, distinct, equal_layers, neighbours, reason
from autopipe.tuning.learning import Seen, learned, predicted_s
from autopipe.tuning.log import OK, Trial, status_of, write_trials

TRIAL_S = 3.0
"""About how long the warm steps of a trial are repeated."""
SILENT_PART, SILENT_S = 0.2, 15.0
"""A trial whose ranks are silent for this part of the budget, and for so many seconds, counts as hung."""
HOPELESS = 1.3
"""A plan that is expected to take so many times the best measured step is not tried."""
_SHORTEST_S = 5.0
"""No trial is begun with less time left."""


@dataclass
class Tuning:
    """A tuning under way. ``deadline`` is a moment of time.monotonic, ``silent_s`` when a silent trial counts as hung.

    ``trials`` are those of this run and of earlier ones in the same folder.
    """

    source: str
    folder: Path
    search: Search
    profile: Profile
    deadline: float
    silent_s: float
    say: Callable[[str], None]
    trials: list[Trial]
    queue: list[Candidate] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The fastest trial."""
        return fastest(self.trials)

    def taught(self) -> Profile:
        """The profile with what the trials taught."""
        seen = [Seen(files.load(self.folder / trial.plan), trial.stages) for trial in self.trials if trial.status == OK]
        return learned(self.profile, seen)

    def next(self) -> Candidate | None:
        """The most promising plan that was not tried; the baselines come early, hopeless plans never."""
        tried = {trial.name for trial in self.trials}
        left = [each for each in distinct(self.queue) if each.name not in tried]
        if not left or self.best is None:
            return left[0] if left else None
        for why in (ALONE, EQUAL):
            if fastest(self.trials, why) is None:
                first = next((each for each in left if reason(each, self.profile) == why), None)
                if first is not None:
                    return first
        taught = self.taught()
        steps = [predicted_s(each.plan, self.profile, taught) for each in left]
        return left[steps.index(min(steps))] if min(steps) < HOPELESS * self.best.step_s else None

    def run(self) -> None:
        """Try plans until the time is over or nothing promising is left."""
        self.follow()
        while (candidate := self.next()) is not None:
            left_s = self.deadline - time.monotonic()
            usual_s = statistics.median([trial.took_s for trial in self.trials if trial.status == OK] or [0.0])
            if left_s < max(_SHORTEST_S, usual_s):
                self.say(f"stopped with {max(left_s, 0.0):.0f} s left: a trial takes {format_duration(usual_s)}")
                return
            if not self.attempt(candidate):
                return
            self.follow()

    def follow(self) -> None:
        """Queue what lies around the best plan so far."""
        if self.best is None:
            return
        plan = files.load(self.folder / self.best.plan)
        self.queue += neighbours(self.search, self.profile, plan)
        pipeline = next((each for each in (plan, *(c.plan for c in self.queue)) if each.depth > 1), None)
        if pipeline is not None:  # the most promising one where the best has none
            self.queue += equal_layers(self.search, self.profile, pipeline)

    def attempt(self, candidate: Candidate) -> bool:
        """One trial, written down whatever comes of it; False when the time was over before it could end."""
        number, plan = len(self.trials) + 1, candidate.plan
        row = Trial(
            candidate.name,
            reason(candidate, self.profile),
            OK,
            predicted_s=plan.predicted.step_s,
            learned_s=predicted_s(plan, self.profile, self.taught()),
            plan=f"plan-{number:03d}.json",
        )
        plan.save(self.folder / row.plan)
        begun = time.monotonic()
        try:
            row = self._measured(row, plan)
        except AutopipeError as error:
            if time.monotonic() >= self.deadline:  # not the plan's fault: a later run may try it again
                self.say(f"stopped: the time was over during {candidate.name}")
                return False
            row = replace(row, status=status_of(error), reason=_reason(error))
        self.trials.append(replace(row, took_s=time.monotonic() - begun))
        write_trials(self.folder / "trials.csv", self.trials)
        self.say(_line(number, self.trials[-1], self.best, self.deadline - time.monotonic()))
        return True

    def _measured(self, row: Trial, plan: Plan) -> Trial:
        from autopipe.runtime.checking.plans import try_plan
        from autopipe.runtime.ranks import launch

        longest_s = max((trial.took_s for trial in self.trials if trial.status == OK), default=0.0)
        silent_s = max(self.silent_s, 10 * plan.predicted.step_s, longest_s)
        with launch.until(self.deadline):
            found = try_plan(plan, self.source, timeout_s=silent_s, seconds=TRIAL_S)
        return replace(
            row,
            step_s=found.step_s,
            spread=found.spread,
            peak_bytes=max(found.peak_bytes),
            forward_s=tuple(stage.forward_s for stage in found.stages),
            backward_s=tuple(stage.backward_s for stage in found.stages),
        )


def fastest(trials: list[Trial], why: str | None = None) -> Trial | None:
    """The fastest trial of those that ran, made for a reason where one is given."""
    ran = [trial for trial in trials if trial.status == OK and why in (None, trial.why)]
    return min(ran, key=lambda trial: trial.step_s, default=None)


def _reason(error: AutopipeError) -> str:
    """What went wrong, without what to do about it: a later trial does better, or none does."""
    return str(error).splitlines()[0].partition("; all ranks were ended")[0]


def _line(number: int, trial: Trial, best: Trial | None, left_s: float) -> str:
    """One line a trial: what, how long, the best so far, the time left."""
    found = f"{format_duration(trial.step_s)}, expected {format_duration(trial.learned_s)}"
    said = found if trial.status == OK else f"{trial.status}, {trial.reason}"
    top = f"best {format_duration(best.step_s)}" if best else "no best yet"
    return f"trial {number:<2} {trial.name}: {said} · {top} · {max(0.0, left_s):.0f} s left"
