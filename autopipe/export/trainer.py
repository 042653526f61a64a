"""A Trainer: its name, what it takes of a plan, and the function that writes its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath

from autopipe.core.errors import CannotExport, UsageError
from autopipe.core.plan import Plan
from autopipe.export.coverage import check_coverage

Files = dict[str, str]
"""File name → text."""

Heading = tuple[str, ...]
"""Lines that every artefact carries as comments: digest, versions, what is lost, what is predicted."""

Maker = Callable[[Plan, Heading], Files]
Stock = Callable[[Plan], str]


@dataclass(frozen=True)
class Trainer:
    """A trainer that takes plans.

    ``target`` is the release that the files are for. ``stock`` names the schedule that it runs for a plan, whatever
    the plan's table says; None where it takes any table. ``recomputes_each`` says whether single layers can
    recompute; else all blocks do or none. ``split_only`` marks a form that promises the split and nothing else.
    ``masters`` and ``shares`` say that it can keep master weights, and share the optimizer's state out to replicas.
    ``averages`` says that it takes the user's loss and averages it over micro-batches, whatever the loss is.
    """

    name: str
    target: str
    make: Maker
    stock: Stock | None = None
    recomputes_each: bool = False
    split_only: bool = False
    masters: bool = False
    shares: bool = False
    averages: bool = False

    def files(self, plan: Plan, heading: Heading = ()) -> Files:
        """The trainer's files. Raises CannotExport when it has no place for the plan, or the plan is not whole."""
        check_coverage(plan)
        if plan.unequal:
            raise CannotExport(f"{self.name} has as many replicas of each stage: plan without --unequal-replicas")
        made = self.make(plan, heading)
        for name in made:
            if name in ("", ".", "..") or PurePath(name).name != name or "\\" in name:
                raise CannotExport(f"{self.name}: {name!r} is no file name: it would leave the folder")
        return made


_TRAINERS: dict[str, Trainer] = {}


def exporter(
    name: str,
    *,
    target: str,
    stock: Stock | None = None,
    recomputes_each: bool = False,
    split_only: bool = False,
    masters: bool = False,
    shares: bool = False,
    averages: bool = False,
) -> Callable[[Maker], Maker]:
    """Register a function as the exporter ``name``; see Trainer for the arguments."""

    def register(make: Maker) -> Maker:
        _TRAINERS[name] = Trainer(name, target, make, stock, recomputes_each, split_only, masters, shares, averages)
        return make

    return register


def trainers() -> tuple[Trainer, ...]:
    """All registered trainers, by name."""
    return tuple(_TRAINERS[name] for name in sorted(_TRAINERS))


def trainer(name: str) -> Trainer:
    """The trainer of that name. Raises UsageError with the known names."""
    try:
        return _TRAINERS[name]
    except KeyError:
        known = ", ".join(known.name for known in trainers())
        raise UsageError(f"trainer {name!r} is not known: use one of {known}") from None
