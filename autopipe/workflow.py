"""The steps behind a command: what is measured, what is read from a file, and where results are kept.

``plan model.py`` is profile → cluster → search. With a ``*.profile.json`` in the model's place nothing is measured
and torch is never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from autopipe.core import files
from autopipe.core.cluster import Cluster
from autopipe.core.errors import FileError, UsageError
from autopipe.core.joined import is_first
from autopipe.core.paths import relative
from autopipe.core.plan import FileRef, ModelRef, Plan
from autopipe.core.profile import Profile, content_digest
from autopipe.core.result import CheckResult, Rehearsal
from autopipe.core.units import format_duration

PROFILE_SUFFIX = ".profile.json"
CLUSTER_SUFFIX = ".cluster.json"
MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batch sizes that are tried when none are asked for, as far as they divide the global batch."""
DEFAULT_SIZES = (1, 2, 4)
"""Micro-batch sizes that ``profile`` makes when none are asked for."""

Progress = Callable[[str], None]
T = TypeVar("T", Profile, Cluster)


@dataclass(frozen=True)
class Planned:
    """A plan and what it was made from; ``ours`` is the plan without the split that was given."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    ours: Plan | None = None

    @property
    def comparison(self) -> str:
        """The steps of the given split and of the one that is chosen freely."""
        yours, ours = self.plan.predicted.step_s, (self.ours or self.plan).predicted.step_s
        return f"yours {format_duration(yours)}, ours {format_duration(ours)}"


def make_plan(
    source: str,
    *,
    global_batch: int,
    devices: int | None,
    cluster: str | None,
    micro_batches: Sequence[int] | None,
    optimizer: str | None,
    threads: int,
    budget_s: float | None,
    like: str | None,
    output: Path,
    progress: Progress,
    **choices: Any,
) -> Planned:
    """Profile and measure what no file says, search, and write the plan; a measured cluster beside it.

    Raises AutopipeError.

    ``like`` is a split that was made elsewhere: it is planned as it is, and once more without it to compare.
    ``choices`` go to the search as they are: depths, schedules, memory_bytes, recompute, pins.
    """
    from autopipe.search import plan

    require_folder(output)
    sizes = usable_sizes(global_batch, micro_batches)
    given = files.read(cluster, Cluster) if cluster else None
    ranks = rank_count(devices, given)
    if is_profile(source):
        profile, saved = files.read(source, Profile), Path(source)
        if threads not in (1, profile.threads):
            raise UsageError(
                f"{source} was measured with {profile.threads} threads a device, not {threads}: profile again"
            )
    else:
        profile, saved = make_profile(
            source,
            devices=ranks,
            micro_batches=sizes,
            threads=threads,
            optimizer=optimizer or "adamw",
            budget_s=budget_s,
            output=None,
            progress=progress,
        )
    used = given or measured_cluster(source, ranks, threads, progress)
    named = cluster or output.with_suffix(CLUSTER_SUFFIX)
    search = partial(
        plan,
        profile,
        used,
        global_batch=global_batch,
        devices=ranks,
        micro_batches=sizes if micro_batches else None,
        optimizer=optimizer,
        model=model_ref(source, profile, output.parent),
        profile_ref=FileRef(profile.digest, relative(saved, output.parent)),
        cluster_ref=FileRef(content_digest(files.plain(used)), relative(named, output.parent)),
    )
    fixed = given_split(like, profile, ranks, choices) if like else {}
    made = search(**choices | fixed)
    ours = search(**choices | {"schedules": also(choices.get("schedules"), fixed["schedules"])}) if like else None
    if is_first():
        if given is None:
            files.write(used, named)
        made.save(output)
    return Planned(made, profile, used, ours)


def given_split(like: str, profile: Profile, devices: int, choices: Mapping[str, Any]) -> dict[str, Any]:
    """A split that was made elsewhere, as choices of the search: every layer pinned to its stage. Raises UsageError.

    It runs by the schedule that its trainer has for it, unless ``schedules`` are asked for, and on as many ranks as it
    can, unless one of ``depths`` is.
    """
    from autopipe.core.schedule import kind
    from autopipe.export.splits import read_split

    if choices.get("pins"):
        raise UsageError("--from says where every layer goes, and so does --pin: leave out one of them")
    split = read_split(like, tuple(layer.name for layer in profile.layers))
    stages = len(split.cuts) + 1
    depth = _depth_of_split(stages, devices, choices.get("depths"))
    per_rank = stages // depth
    named = list(choices.get("schedules") or split.schedules(per_rank))
    for name in named:
        if name != "all":
            kind(name).place(depth, per_rank)
    pins = {layer.name: sum(cut <= index for cut in split.cuts) for index, layer in enumerate(profile.layers)}
    return {"depths": (depth,), "stages_per_rank": per_rank, "pins": pins, "schedules": named or None}


def _depth_of_split(stages: int, devices: int, depths: Sequence[int] | None) -> int:
    """How many ranks a split of so many stages runs on. Raises UsageError where they would not be equally many."""
    if depths and len(depths) > 1:
        raise UsageError(f"--from takes one --depth, not {', '.join(map(str, depths))}")
    depth = depths[0] if depths else min(stages, devices)
    if stages % depth:
        fitting = [str(count) for count in range(1, stages + 1) if stages % count == 0]
        asked = f"--depth {depth} cannot" if depths else f"{devices} devices cannot"
        raise UsageError(
            f"--from has {stages} stages, which {asked} share equally: use {'--depth' if depths else '--devices'} "
            f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        )
    return depth


def also(asked: Sequence[str] | None, named: Sequence[str] | None) -> Sequence[str] | None:
    """The schedules that our own plan may have: those asked for, or the default ones and what the split is run by."""
    from autopipe.planning.request import DEFAULT_SCHEDULES

    return asked or (named and (*DEFAULT_SCHEDULES, *named))


def get_profile(
    source: str,
    *,
    origin: str | None,
    device: str | None,
    dtype: str | None,
    devices: int,
    micro_batches: Sequence[int] | None,
    threads: int,
    optimizer: str,
    budget_s: float | None,
    output: Path | None,
    progress: Progress,
) -> tuple[Profile, Path]:
    """What ``autopipe profile`` makes of its source, and where it lies: imported, computed, or measured.

    Raises AutopipeError.
    """
    from autopipe import elsewhere
    from autopipe.importers import format_of

    if output:
        require_folder(output)
    if name := format_of(source, origin):
        return elsewhere.imported(source, name, micro_batches=micro_batches, device=device, dtype=dtype, output=output)
    if dtype is not None:
        raise UsageError("--dtype is for imported figures: a model file has its own")
    sizes = micro_batches or DEFAULT_SIZES
    if device is not None:
        return elsewhere.analytic(
            source,
            device,
            micro_batches=sizes,
            threads=threads,
            optimizer=optimizer,
            output=output,
            progress=progress,
        )
    return make_profile(
        source,
        devices=devices,
        micro_batches=sizes,
        threads=threads,
        optimizer=optimizer,
        budget_s=budget_s,
        output=output,
        progress=progress,
    )


def make_profile(source: str, *, output: Path | None, **options: Any) -> tuple[Profile, Path]:
    """Measure a model file, or reuse what was measured; also says where the profile lies. Raises AutopipeError.

    ``options`` are those of ``autopipe.profile``.
    """
    if is_profile(source):
        raise UsageError(f"{source} is a profile already: name the model file to measure it again")
    from autopipe.runtime.measuring.profiling import default_path, profile
    from autopipe.runtime.workload import ModelFile

    if output:
        require_folder(output)
    made = profile(source, save=output, **options)
    saved = output or default_path(ModelFile.parse(source))
    assert saved is not None  # a model file always has a place for its profile
    return made, saved


def measured_cluster(source: str, devices: int, threads: int, progress: Progress) -> Cluster:
    """Links between local processes. Raises UsageError for a profile, whose devices may be elsewhere."""
    if is_profile(source):
        raise UsageError(f"planning from {source} needs the devices it is for: add --cluster FILE")
    from autopipe.runtime.measuring.links import measure_cluster

    return measure_cluster(devices, threads=threads, progress=progress)


def usable_sizes(global_batch: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batch sizes that divide the global batch. Raises UsageError when none does."""
    sizes = tuple(size for size in asked or MICRO_BATCHES if global_batch % size == 0)
    if not sizes:
        wanted = ", ".join(map(str, asked or ()))
        raise UsageError(
            f"--global-batch {global_batch} is no multiple of --micro-batch {wanted}: use one that divides it"
        )
    return sizes


def rank_count(devices: int | None, cluster: Cluster | None) -> int:
    """How many devices to plan for. Raises UsageError when nothing says it, or when there are fewer."""
    if devices is None:
        if cluster is None:
            raise UsageError("how many devices? Add --devices N, or --cluster FILE")
        return len(cluster)
    return len(cluster.take(devices)) if cluster else devices


def is_profile(source: str) -> bool:
    """Whether the source is a profile's file, not a model's. Raises FileError for another JSON file."""
    if source.endswith(".json") and not source.endswith(PROFILE_SUFFIX):
        raise FileError(f"{source} is no model file (.py), and no profile: a profile's name ends in {PROFILE_SUFFIX}")
    return source.endswith(PROFILE_SUFFIX)


def require_folder(output: Path) -> None:
    """Raises FileError when there is no folder to write to: better before minutes of measuring than after."""
    if not output.parent.is_dir():
        raise FileError(f"{output} cannot be written: folder {output.parent} does not exist")


def model_ref(source: str, profile: Profile, folder: Path) -> ModelRef:
    """How a plan in ``folder`` names its model; a model known by its profile only has no path."""
    if is_profile(source):
        return ModelRef(profile.model)
    from autopipe.runtime.workload import ModelFile

    model = ModelFile.parse(source)
    return ModelRef(profile.model, relative(model.path, folder), model.builder, model.digest)


def run_check(
    path: Path, *, model: str | None, timeout_s: float | None, progress: Progress
) -> tuple[Plan, CheckResult]:
    """Run a plan, and write what it showed beside it. Raises AutopipeError."""
    plan = files.load(path)  # a bad file is told before torch is loaded
    from autopipe.runtime.checking.plans import check

    result = check(str(path), model=model, timeout_s=timeout_s, progress=progress)
    if is_first():
        files.write(result, files.check_path(path))
    return plan, result


def run_rehearsal(path: Path, *, timeout_s: float | None, progress: Progress) -> Rehearsal:
    """Run a plan with stages that wait instead of computing; write what it showed beside it. Raises AutopipeError."""
    plan = files.load(path)
    from autopipe.runtime.checking.rehearsal import rehearse

    result = rehearse(plan, timeout_s=timeout_s, progress=progress)
    files.write(result, files.rehearsal_path(path))
    return result


def open_plan(path: Path) -> tuple[Plan, CheckResult | None]:
    """A plan, and the result of its last check where that was of this very plan. Raises FileError."""
    plan, checked = files.load(path), files.check_path(path)
    result = files.read(checked, CheckResult) if checked.exists() else None
    return plan, result if result and result.plan_digest == plan.digest else None


class Origins(NamedTuple):
    """The profile and the cluster that a plan was made from, as far as they are still there; else what is missing."""

    profile: Profile | None
    cluster: Cluster | None
    missing: tuple[str, ...]


def origins(path: Path, plan: Plan) -> Origins:
    """Read the files that a plan names. One that is gone or has another content counts as missing, and says which."""
    profile, no_profile = _origin(path, plan.profile, Profile, "profile")
    cluster, no_cluster = _origin(path, plan.cluster, Cluster, "cluster")
    return Origins(profile, cluster, tuple(filter(None, (no_profile, no_cluster))))


def _origin(path: Path, ref: FileRef, kind: type[T], what: str) -> tuple[T | None, str]:
    """The value, or None and the reason."""
    if ref.path is None:
        return None, f"the plan names no {what} file"
    try:
        value = files.read(path.parent / ref.path, kind)
    except FileError as error:
        return None, str(error)
    if content_digest(files.plain(value)) != ref.digest:
        return None, f"{what} {path.parent / ref.path} has changed since the plan was made"
    return value, ""


def explain_plan(plan: Plan, found: Origins) -> str:
    """The paragraph of ``show --why``. Raises UsageError when the profile or the cluster is missing."""
    if found.profile is None or found.cluster is None:
        raise UsageError(f"--why computes its numbers from the plan's files: {'; '.join(found.missing)}. Plan again")
    from autopipe.explain import explanation

    return explanation(plan, found.profile, found.cluster)


def write_report(path: Path, plan: Plan, result: CheckResult | None, found: Origins, why: str) -> Path:
    """Write the HTML page of a plan. Raises FileError where it cannot be written."""
    from autopipe.report.html import report

    files.write_text(report(plan, profile=found.profile, cluster=found.cluster, measured=result, why=why), path)
    return path


def write_trace(path: Path, plan: Plan, result: CheckResult | None) -> Path:
    """Write the predicted and the measured timeline as trace events. Raises FileError where it cannot be written."""
    from autopipe.report.trace import trace_json
    from autopipe.simulate import simulate_plan

    files.write_text(trace_json([simulate_plan(plan), *([result.timeline] if result else [])]), path)
    return path
