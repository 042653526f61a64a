"""What running a plan showed: predicted against measured, and whether losses and gradients are those of one process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.core.errors import UsageError
from autopipe.core.plan import Prediction
from autopipe.core.timeline import Timeline


@dataclass(frozen=True)
class Measured:
    """Medians over warm steps. Bytes are per rank.

    ``spread`` is (q75 − q25) / median of the step. ``peak_bytes`` is what the tensors took, ``resident_bytes`` the
    most that the whole process took, interpreter and libraries included.
    """

    step_s: float
    spread: float
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeasuredStage:
    """Median seconds of one micro-batch in a stage."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Parity:
    """The plan's run against one process with the same seed and the same micro-batches, accumulated in order.

    Differences are relative to the largest reference value of each tensor; ``worst`` names the tensor that
    differs most. ``losses`` holds one mean loss a step, ``reference_losses`` those of one process. A difference or a
    loss that is not a finite number is None.
    """

    passed: bool
    max_loss_difference: float | None
    max_gradient_difference: float | None
    losses: tuple[float | None, ...]
    reference_losses: tuple[float | None, ...]
    tolerance: float
    worst: str = ""

    def __post_init__(self) -> None:
        for name in ("max_loss_difference", "max_gradient_difference"):
            object.__setattr__(self, name, _finite(getattr(self, name)))
        for name in ("losses", "reference_losses"):
            object.__setattr__(self, name, tuple(map(_finite, getattr(self, name))))


def _finite(value: float | None) -> float | None:
    """None for NaN and infinity, which no file may hold."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class CheckResult:
    """One run of a plan. ``error`` = measured / predicted − 1 of the step. ``plan_digest`` says which plan it was.

    ``staleness`` is for each stage of an asynchronous plan how many updates old the weights were that forwards met.
    """

    predicted: Prediction
    measured: Measured
    error: float
    parity: Parity
    timeline: Timeline
    stages: tuple[MeasuredStage, ...]
    notes: tuple[str, ...] = ()
    plan_digest: str = ""
    staleness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ranks = len(self.predicted.peak_bytes)
        if len(self.measured.peak_bytes) != ranks:
            raise UsageError(f"check: {ranks} ranks were predicted, {len(self.measured.peak_bytes)} measured")

    def __str__(self) -> str:
        from autopipe.report.terminal import check_text

        return check_text(self)


@dataclass(frozen=True)
class Rehearsal:
    """A plan run with stages that wait instead of computing, against what that should take.

    ``predicted`` and ``measured`` are Timelines of the same, stretched times: all seconds of the plan are multiplied
    by ``factor``, and the machine's own costs are in both: ``overhead_s`` an action, ``message_s`` the way of an
    empty message. ``step_s`` is the median over the steps that were run, ``spread`` their (q75 − q25) / median;
    ``measured`` is the step nearest to it.
    """

    predicted: Timeline
    measured: Timeline
    step_s: float
    spread: float
    factor: float
    overhead_s: float
    message_s: float
    notes: tuple[str, ...] = ()
    plan_digest: str = ""

    @property
    def error(self) -> float:
        """measured / predicted − 1 of the step."""
        return self.step_s / self.predicted.step_s - 1
