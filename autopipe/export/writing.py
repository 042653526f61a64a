"""From a plan's file to a trainer's files: what is lost is told before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import autopipe.schedules  # noqa: F401  (trainers' own schedules are looked up by name)
from autopipe.core import files
from autopipe.core.errors import CannotExport, FileError
from autopipe.core.paths import relative
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile
from autopipe.export.heading import heading
from autopipe.export.remaining import predict, remaining
from autopipe.export.trainer import trainer


@dataclass(frozen=True)
class Exported:
    """What was written, and the heading that the files carry: losses and predicted step included."""

    paths: tuple[Path, ...]
    heading: tuple[str, ...]


def export_plan(path: Path, to: str, folder: Path, *, allow_lossy: bool = False) -> Exported:
    """Write the plan for a trainer into a folder, which is made where it is missing.

    Raises CannotExport when the trainer cannot express the plan, or only in part without ``allow_lossy``; then nothing
    is written.
    """
    plan, target = files.load(path), trainer(to)
    if plan.schedule.executor == "own":
        raise CannotExport(
            f"{to} has no {plan.schedule.name}, which autopipe's own runtime trains with: see docs/asynchronous.md, or "
            f"plan another schedule"
        )
    rest = remaining(plan, target)
    predicted = predict(plan, rest, _profile(plan, path)) if rest.losses else None
    head = heading(plan, target, rest, predicted)
    made = target.files(_seen_from(plan, path, folder), head)
    if rest.losses and not allow_lossy:
        lost = "; ".join(line for line in head if line.startswith(("not expressed", "predicted", "what remains")))
        raise CannotExport(f"{to} cannot express all of the plan: {lost}. Add --allow-lossy to export the rest")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder} cannot be made: {error.strerror}") from None
    for name, text in made.items():
        files.write_text(text, folder / name)
    return Exported(tuple(folder / name for name in made), head)


def _profile(plan: Plan, path: Path) -> Profile | None:
    """The profile that the plan was made from, where its file still lies there unchanged."""
    if plan.profile.path is None:
        return None
    try:
        found = files.read(path.parent / plan.profile.path, Profile)
    except FileError:
        return None
    return found if found.digest == plan.profile.digest else None


def _seen_from(plan: Plan, path: Path, folder: Path) -> Plan:
    """The plan with its model's path relative to another folder."""
    if plan.model.path is None:
        return plan
    moved = relative(path.parent / plan.model.path, folder)
    return replace(plan, model=replace(plan.model, path=moved))
