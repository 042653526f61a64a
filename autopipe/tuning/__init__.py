"""``autopipe tune``: plan, really run the best few plans and their neighbours, learn from them, and keep the best.

Every trial has its own processes and its time; a crash, a lack of memory or a hang is a row of trials.csv like any
other. The folder of a tuning holds the measured cluster, trials.csv, and each tried plan; the same command goes on
from there. The parts: candidates (what is worth a trial), loop (which is next, and running it), learning (what a
trial teaches), log (what is kept).
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopipe.core import files
from autopipe.core.cluster import Cluster
from autopipe.core.errors import AutopipeError, CheckFailed, UsageError
from autopipe.core.paths import relative
from autopipe.core.plan import FileRef, Plan
from autopipe.core.profile import Profile, content_digest
from autopipe.core.units import format_duration, format_percent, many
from autopipe.planning.request import wanted_kinds
from autopipe.search import plan as search_plan
from autopipe.tuning.candidates import ALONE, COPIES, EQUAL, candidates
from autopipe.tuning.log import MEMORY, OK, Trial, read_trials, status_of, write_trials
from autopipe.tuning.loop import SILENT_PART, SILENT_S, Tuning, fastest
from autopipe.workflow import (
    is_profile,
    make_profile,
    measured_cluster,
    model_ref,
    rank_count,
    require_folder,
    usable_sizes,
)

PROFILE_PART = 0.25
"""The part of the budget that timing layers may take."""
PROFILED = "profile"
"""Why a micro-batch size that cannot be profiled stands among the trials."""

Progress = Callable[[str], None]


@dataclass
class Tuned:
    """What a tuning found: all trials of its folder, and the plan that was measured to be the fastest."""

    trials: list[Trial]
    best: Trial
    plan: Plan
    folder: Path
    interrupted: bool = False

    @property
    def gains(self) -> dict[str, float | None]:
        """How many times the best is faster than equal layers, no pipeline, and copies; None where one never ran."""
        pairs = {why: fastest(self.trials, why) for why in (EQUAL, ALONE, COPIES)}
        return {why: trial.step_s / self.best.step_s if trial else None for why, trial in pairs.items()}

    @property
    def errors(self) -> tuple[float, float] | None:
        """The median |error| of the predictions: by the profile as it was, and by what earlier trials had taught.

        The first trial, before which nothing was learned, does not count; None when there is no other.
        """
        later = [trial for trial in self.trials if trial.status == OK][1:]
        if not later:
            return None
        first = statistics.median(abs(trial.predicted_s / trial.step_s - 1) for trial in later)
        return first, statistics.median(abs(trial.learned_s / trial.step_s - 1) for trial in later)


def tune(
    source: str,
    *,
    global_batch: int,
    devices: int | None = None,
    budget_s: float = 120.0,
    cluster: str | None = None,
    micro_batches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    memory_bytes: int | None = None,
    optimizer: str | None = None,
    threads: int = 1,
    output: str | Path = "plan.json",
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Tune a model file for about ``budget_s`` seconds, and write the plan that was measured to be the fastest.

    ``folder`` keeps the trials, by default ``plan.tune`` beside ``plan.json``; where it holds trials of the same
    request they are gone on with. An interrupt ends the trials and keeps the best. Raises CheckFailed when no plan
    ran, UsageError for a folder of another request.
    """
    deadline, say = time.monotonic() + budget_s, progress or (lambda text: None)
    target = Path(output)
    require_folder(target)
    place = Path(folder) if folder else target.with_suffix(".tune")
    given = files.read(cluster, Cluster) if cluster else None
    ranks, sizes = rank_count(devices, given), usable_sizes(global_batch, micro_batches)
    names = [kind.name for kind in wanted_kinds(schedules)]
    asked = {
        "model": model_digest(source),
        "devices": ranks,
        "global_batch": global_batch,
        "micro_batches": list(sizes),
        "schedules": names,
        "memory_bytes": memory_bytes,
        "optimizer": optimizer,
        "threads": threads,
        "cluster": content_digest(files.plain(given)) if given else None,
    }
    trials = _opened(place, asked)
    with _in_time(deadline):
        profile, saved = _profiled(
            source,
            sizes,
            trials,
            place,
            deadline,
            devices=ranks,
            threads=threads,
            optimizer=optimizer or "adamw",
            budget_s=PROFILE_PART * budget_s,
            progress=say,
        )
        used, named = _cluster(source, given, cluster, place, ranks, threads, say)
    measured = [size for size in sizes if size in profile.micro_batches]
    fixed: dict[str, Any] = {
        "global_batch": global_batch,
        "devices": ranks,
        "micro_batches": measured,
        "schedules": names,
        "memory_bytes": memory_bytes,
        "optimizer": optimizer,
        "model": model_ref(source, profile, place),
        "profile_ref": FileRef(profile.digest, relative(saved, place)),
        "cluster_ref": FileRef(content_digest(files.plain(used)), relative(named, place)),
    }

    def search(**choices: Any) -> Plan:
        return search_plan(profile, used, **(fixed | choices))

    silent_s = max(SILENT_S, SILENT_PART * budget_s)
    tuning = Tuning(source, place, search, profile, deadline, silent_s, say, trials)
    return _tuned(tuning, target, range(1, ranks + 1), measured, names)


def _tuned(
    tuning: Tuning, target: Path, depths: Sequence[int], sizes: Sequence[int], schedules: Sequence[str]
) -> Tuned:
    """Run the trials, and write the best plan where it was asked for."""
    interrupted = False
    try:
        tuning.queue = candidates(tuning.search, depths=depths, micro_batches=sizes, schedules=schedules)
        if tuning.best:
            ran = many(len(tuning.trials), "trial")
            tuning.say(f"going on after {ran}: best {format_duration(tuning.best.step_s)}")
        tuning.run()
    except KeyboardInterrupt:
        interrupted = True
        if tuning.best is None:
            raise
    best = tuning.best
    if best is None:
        reasons = "; ".join(f"{trial.name}: {trial.reason}" for trial in tuning.trials) or "the time was too short"
        raise CheckFailed(f"no plan ran: {reasons}. Give more time with --budget")
    plan = moved(files.load(tuning.folder / best.plan), tuning.folder, target.parent)
    plan.save(target)
    return Tuned(tuning.trials, best, plan, tuning.folder, interrupted)


def moved(plan: Plan, here: Path, there: Path) -> Plan:
    """A plan that lay in one folder, for another one: its paths lead to the same files."""

    def path(old: str | None) -> str | None:
        return relative(here / old, there) if old else old

    return replace(
        plan,
        model=replace(plan.model, path=path(plan.model.path)),
        profile=replace(plan.profile, path=path(plan.profile.path)),
        cluster=replace(plan.cluster, path=path(plan.cluster.path)),
    )


def _opened(place: Path, asked: dict[str, Any]) -> list[Trial]:
    """The trials of a folder, which is made if need be. Raises UsageError where they are of another request."""
    place.mkdir(exist_ok=True)
    request = place / "request.json"
    if request.exists():
        before = json.loads(request.read_text(encoding="utf-8"))
        changed = [name for name, value in asked.items() if before.get(name) != value]
        if changed:
            name = changed[0]
            raise UsageError(
                f"{place} holds trials for another request ({name} {before.get(name)!r}, now {asked[name]!r}): give "
                f"another --folder, or remove it"
            )
    files.write_text(json.dumps(asked, indent=1) + "\n", request)
    return read_trials(place / "trials.csv")


@contextlib.contextmanager
def _in_time(deadline: float) -> Iterator[None]:
    """End whatever is measured inside at the deadline, and say what that means."""
    from autopipe.runtime.ranks import launch

    try:
        with launch.until(deadline):
            yield
    except AutopipeError as error:
        if time.monotonic() < deadline:
            raise
        raise CheckFailed(
            "no plan ran: the time was over before the layers and the links were measured. Give more time with --budget"
        ) from error


def _profiled(
    source: str, sizes: Sequence[int], trials: list[Trial], place: Path, deadline: float, **options: Any
) -> tuple[Profile, Path]:
    """The profile of the micro-batch sizes that can be measured; of those that cannot, a row among the trials."""
    known = {trial.name for trial in trials if trial.why == PROFILED}
    left = [size for size in sorted(sizes) if _size_name(size) not in known]

    def failed(size: int, status: str, reason: str) -> None:
        trials.append(Trial(_size_name(size), PROFILED, status, reason=reason))
        write_trials(place / "trials.csv", trials)
        options["progress"](f"trial {len(trials):<2} {_size_name(size)}: {status}, {reason}")

    try:
        made, saved = make_profile(source, micro_batches=left, output=None, **options)
    except AutopipeError as error:
        if len(left) < 2 or time.monotonic() >= deadline:
            raise
        options["progress"](f"profiling failed, now one micro-batch size after another: {str(error).splitlines()[0]}")
        made, saved = _one_by_one(source, left, deadline, failed, **options)
    for size in sorted({*left} & {*made.out_of_memory}):
        failed(size, MEMORY, "while its layers were timed")
    return made, saved


def _one_by_one(
    source: str, sizes: Sequence[int], deadline: float, failed: Callable[[int, str, str], None], **options: Any
) -> tuple[Profile, Path]:
    """The same where one of the sizes ends the others' measurement too.

    What is larger than a size that ran out of memory is not measured.
    """
    options["budget_s"] /= len(sizes)
    made, last = None, None
    for size in sizes:
        try:
            if last and status_of(last) == MEMORY:
                raise last
            made = make_profile(source, micro_batches=[size], output=None, **options)
        except AutopipeError as error:
            if time.monotonic() >= deadline:
                raise
            last = error
            failed(size, status_of(error), str(error).splitlines()[0])
    if made is None:
        assert last is not None
        raise last
    return made


def model_digest(source: str) -> str:
    """The digest of a model file, and the name of its builder. Raises UsageError for a profile."""
    if is_profile(source):
        raise UsageError(f"{source} is a profile: tuning runs the model, name its file")
    from autopipe.runtime.workload import ModelFile

    model = ModelFile.parse(source)
    return f"{model.digest}:{model.builder}"


def _size_name(size: int) -> str:
    return f"micro-batch {size}"


def _cluster(
    source: str, given: Cluster | None, path: str | None, place: Path, ranks: int, threads: int, say: Progress
) -> tuple[Cluster, Path | str]:
    """The cluster that was given, or the one that was measured in an earlier run, or measured now."""
    if given is not None and path is not None:
        return given, path
    kept = place / "cluster.json"
    if not kept.exists():
        files.write(measured_cluster(source, ranks, threads, say), kept)
    return files.read(kept, Cluster), kept


def summary(tuned: Tuned) -> str:
    """Every trial, and what the tuning gained, in lines for a terminal."""
    best, ran = tuned.best, sum(trial.status == OK for trial in tuned.trials)
    lines = [f"{'trial':<7}{'step':>10}{'expected':>10}  plan"]
    for number, trial in enumerate(tuned.trials, 1):
        mark = "*" if trial is best else " "
        if trial.status == OK:
            numbers = f"{format_duration(trial.step_s):>10}{format_duration(trial.learned_s):>10}"
            lines.append(f"{number:>5}{mark} {numbers}  {trial.name}")
        else:
            lines.append(f"{number:>5}  {trial.status:>20}  {trial.name}: {trial.reason}")
    failed = f", {len(tuned.trials) - ran} failed" if ran < len(tuned.trials) else ""
    lines += ["", f"best      {best.name} · {format_duration(best.step_s)} a step · {many(ran, 'trial')}{failed}"]
    lines += [f"gain      {_gain(why, gain, best)}" for why, gain in tuned.gains.items() if gain or why != COPIES]
    if tuned.errors:
        before, after = map(format_percent, tuned.errors)
        lines.append(
            f"learned   predictions were {before} off by the profile, {after} with what trials taught (median)"
        )
    return "\n".join([*lines, f"trials    {tuned.folder / 'trials.csv'}"])


def _gain(why: str, gain: float | None, best: Trial) -> str:
    """How much faster the best is than a baseline, or that it is one."""
    if best.why == why:
        return f"the best is {why}"
    return f"{gain:.2f} times as fast as {why}" if gain else f"{why} did not run"
