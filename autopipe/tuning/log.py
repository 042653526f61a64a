"""The record of a tuning: one row a trial in trials.csv, failures too. It is all that a later run needs to go on."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autopipe.core import files
from autopipe.core.errors import FileError
from autopipe.core.result import MeasuredStage

OK, MEMORY, HUNG, FAILED = "ok", "out of memory", "hung", "failed"


@dataclass(frozen=True)
class Trial:
    """One trial. Times are seconds and 0 where it failed; ``predicted_s`` is by the profile as it was measured,
    ``learned_s`` by what the trials before had taught. ``forward_s`` and ``backward_s`` list the stages' medians.
    """

    name: str
    why: str
    status: str
    step_s: float = 0.0
    spread: float = 0.0
    predicted_s: float = 0.0
    learned_s: float = 0.0
    peak_bytes: int = 0
    took_s: float = 0.0
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    reason: str = ""
    plan: str = ""

    @property
    def stages(self) -> tuple[MeasuredStage, ...]:
        """The stages' medians."""
        return tuple(map(MeasuredStage, self.forward_s, self.backward_s))


def status_of(error: Exception) -> str:
    """Which kind of failure an error is."""
    text = str(error).lower()
    if "memoryerror" in text or "out of memory" in text or "outofmemory" in text or "allocate memory" in text:
        return MEMORY
    return HUNG if " hung in " in text or "its time was over" in text else FAILED


def write_trials(path: Path, trials: list[Trial]) -> None:
    """Replace the file, whole."""
    stream = io.StringIO()
    rows = csv.writer(stream, lineterminator="\n")
    rows.writerow([field.name for field in fields(Trial)])
    for trial in trials:
        rows.writerow([" ".join(map(repr, v)) if isinstance(v, tuple) else v for v in asdict(trial).values()])
    files.write_text(stream.getvalue(), path)


def read_trials(path: Path) -> list[Trial]:
    """The trials of a file; none where there is no file. Raises FileError where it is not one of ours."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            return list(_parsed(stream))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, csv.Error) as error:
        raise FileError(f"{path} is not a list of trials ({error}): remove it, or give another --folder") from None


def _parsed(stream: io.TextIOBase | Iterator[str]) -> Iterator[Trial]:
    kinds = {field.name: field.type for field in fields(Trial)}
    for row in csv.DictReader(stream):
        yield Trial(**{name: _value(str(kinds[name]), text) for name, text in row.items()})


def _value(kind: str, text: str) -> Any:
    if kind.startswith("tuple"):
        return tuple(map(float, text.split()))
    return {"str": str, "float": float, "int": int}[kind](text)
