"""The same stages by integer programming: a certificate of device_dp that shares nothing with it, and side constraints.

A column is one stage with one option and one range of pieces, chosen or not. Each stage has one; the next stage begins
where it ends; classes of devices suffice; z is at least the work of each. What the user asks beyond that (a limit over
all stages, devices that go together) is a sum over columns, which a dynamic program has no place for.

HiGHS takes no start. The value of a known solution is given as ``cutoff``: it drops the columns that cannot be part of
anything as good, by the least sums before and after them, and bounds the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopipe.core.errors import UsageError
from autopipe.solvers.chain_dp import Floats, prefix_sums
from autopipe.solvers.device_dp import Assigned, Option

_TOLERANCE = 1e-6
"""Values closer than this, relatively, are the solver's rounding."""


class Column(NamedTuple):
    """A stage that may be chosen: its number, its option's, and the positions where it begins and ends."""

    stage: int
    option: int
    start: int
    stop: int


@dataclass(frozen=True)
class Side:
    """``least`` ≤ Σ weight of the chosen columns ≤ ``most``."""

    weight: Callable[[Column], float]
    least: float = -np.inf
    most: float = np.inf


class Certificate(NamedTuple):
    """The best stages found, None where there were none in time or are none; and what nothing can be below."""

    assigned: Assigned | None
    lower_bound: float

    @property
    def proved(self) -> bool:
        """Whether the stages are the best there are, up to the solver's tolerance."""
        return self.assigned is not None and self.lower_bound >= self.assigned.value * (1 - _TOLERANCE)


def smallest_maximum(
    options: Sequence[Option],
    available: Sequence[int],
    *,
    cutoff: float = np.inf,
    allowed: Callable[[Column], bool] | None = None,
    sides: Sequence[Side] = (),
    seconds: float = np.inf,
) -> Certificate:
    """The stages whose most expensive one is cheapest, by ``work``; see device_dp.

    Only columns that are ``allowed`` are used, and only solutions up to the ``cutoff`` are looked for: where there are
    none it is the bound, infinite where there is none at all. Raises UsageError where pulp or HiGHS is not installed.
    """
    nothing = [np.zeros_like(option.work) for option in options]
    return _solve(_Model(options, available, nothing, 1, cutoff, allowed, sides), seconds)


def smallest_step(
    options: Sequence[Option],
    available: Sequence[int],
    repeats: int,
    *,
    cutoff: float = np.inf,
    allowed: Callable[[Column], bool] | None = None,
    sides: Sequence[Side] = (),
    seconds: float = np.inf,
) -> Certificate:
    """The stages with the smallest Σ(work + other) + repeats · max(work); the rest as in smallest_maximum."""
    both = [option.work if option.other is None else option.work + option.other for option in options]
    return _solve(_Model(options, available, both, repeats, cutoff, allowed, sides), seconds)


@dataclass(frozen=True, eq=False)
class _Model:
    """What is asked: Σ sums + repeats · max(work), ``sums`` a table for each option."""

    options: Sequence[Option]
    available: Sequence[int]
    sums: Sequence[Floats]
    repeats: int
    cutoff: float
    allowed: Callable[[Column], bool] | None
    sides: Sequence[Side]

    def columns(self) -> list[Column]:
        """The columns that may be part of something within the cutoff."""
        possible = [
            np.isfinite(option.work) & np.isfinite(sums) for option, sums in zip(self.options, self.sums, strict=True)
        ]
        cheapest = np.min([np.where(p, sums, np.inf) for p, sums in zip(possible, self.sums, strict=True)], axis=0)
        before = prefix_sums(cheapest)
        after = prefix_sums(cheapest[::-1, ::-1, ::-1].transpose(0, 2, 1))[::-1, ::-1]
        found = []
        for number, option in enumerate(self.options):
            work = np.where(possible[number], option.work, 0.0)
            least = before[:, :, None] + self.sums[number] + after[:, None, :] + self.repeats * work
            good = possible[number] & (least <= self.cutoff * (1 + _TOLERANCE)) & np.isfinite(least)
            found += [Column(int(s), number, int(i), int(j)) for s, i, j in np.argwhere(good)]
        return [column for column in sorted(found) if self.allowed is None or self.allowed(column)]

    def work(self, column: Column) -> float:
        """The work of a column."""
        return float(self.options[column.option].work[column.stage, column.start, column.stop])

    def sum(self, column: Column) -> float:
        """What a column adds to the sum."""
        return float(self.sums[column.option][column.stage, column.start, column.stop])

    def value(self, chosen: Sequence[Column]) -> float:
        """The objective of chosen columns."""
        return sum(map(self.sum, chosen)) + self.repeats * max(map(self.work, chosen))


def _solve(model: _Model, seconds: float) -> Certificate:
    columns = model.columns()
    stages, width, _ = model.options[0].work.shape
    if {column.stage for column in columns} != set(range(stages)):
        return Certificate(None, model.cutoff)
    pulp = _pulp()
    problem = pulp.LpProblem("stages", pulp.LpMinimize)
    chosen = {column: problem.add_variable("x_" + "_".join(map(str, column)), cat="Binary") for column in columns}
    unit = max(map(model.work, columns)) or 1.0
    longest = problem.add_variable("longest", lowBound=0)
    total = pulp.lpSum(model.sum(column) / unit * x for column, x in chosen.items())
    problem += total + model.repeats * longest
    if np.isfinite(model.cutoff):
        problem += total + model.repeats * longest <= model.cutoff / unit * (1 + _TOLERANCE)
    for constraint in _constraints(pulp, model, chosen, longest, unit, stages, width):
        problem += constraint
    status, bound = _run(pulp, problem, seconds)
    if status == "infeasible":
        return Certificate(None, model.cutoff)
    taken = sorted(column for column, x in chosen.items() if x.varValue is not None and x.varValue > 0.5)
    assigned = _assigned(model, taken, stages)
    return Certificate(assigned, min(bound * unit, assigned.value) if assigned else bound * unit)


def _constraints(
    pulp: Any, model: _Model, chosen: dict[Column, Any], longest: Any, unit: float, stages: int, width: int
) -> Iterator[Any]:
    """One column a stage, from the first position to the last without gaps, enough devices, z, and the sides."""

    def total(columns: Iterator[Column], weight: Callable[[Column], float] = lambda column: 1.0) -> Any:
        return pulp.lpSum(weight(column) * chosen[column] for column in columns)

    for stage in range(stages):
        own = [column for column in chosen if column.stage == stage]
        yield total(iter(own)) == 1
        yield total(iter(own), lambda column: model.work(column) / unit) <= longest
        for position in range(1, width) if stage + 1 < stages else ():
            ending = (column for column in own if column.stop == position)
            yield total(ending) == total(c for c in chosen if c.stage == stage + 1 and c.start == position)
    yield total(c for c in chosen if c.stage == 0 and c.start == 0) == 1
    yield total(c for c in chosen if c.stage == stages - 1 and c.stop == width - 1) == 1
    for device, most in enumerate(model.available):
        users = (column for column in chosen if model.options[column.option].device == device)
        yield total(users, lambda column: float(model.options[column.option].count)) <= most
    for side in model.sides:
        if np.isfinite(side.most):
            yield total(iter(chosen), side.weight) <= side.most
        if np.isfinite(side.least):
            yield total(iter(chosen), side.weight) >= side.least


def _assigned(model: _Model, taken: Sequence[Column], stages: int) -> Assigned | None:
    if [column.stage for column in taken] != list(range(stages)):
        return None
    positions = (0, *(column.stop for column in taken))
    return Assigned(positions, tuple(column.option for column in taken), model.value(taken))


def _run(pulp: Any, problem: Any, seconds: float) -> tuple[str, float]:
    """How it ended, and the bound."""
    limit = seconds if np.isfinite(seconds) else None
    solver = pulp.HiGHS(msg=False, threads=1, timeLimit=limit, gapRel=0, gapAbs=1e-9)
    with _quiet():
        problem.solve(solver)
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return "infeasible", np.inf
    return "solved", float(problem.solverModel.getInfo().mip_dual_bound)


def _pulp() -> Any:
    try:
        import highspy  # noqa: F401
        import pulp
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'autopipe[ilp]'") from error
    return pulp


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints its name to file descriptor 1 when it is first used, whatever it is told."""
    kept, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nothing)
