"""A split that was made elsewhere, as cuts of a profiled model.

megatron:Ett|tttL          Megatron's pipeline layout
counts:18,15,15,13         blocks a stage
torchtitan:FILE            a Python file with MODULE_FQNS_PER_MODEL_PART, or that keyword; it is read, never run
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import autopipe.schedules  # noqa: F401  (a file names one)
from autopipe.core.errors import CannotExport, FileError, UsageError
from autopipe.core.schedule import kind
from autopipe.export.counts import cuts_of_counts
from autopipe.export.megatron_layout import read_layout
from autopipe.export.names import Role, parts
from autopipe.export.torchtitan import module_name

Layers = tuple[str, ...]
_FIELD = "module_fqns_per_model_part"


@dataclass(frozen=True)
class Split:
    """A split: the first layer of every stage but the first, and the trainer's schedule where the split names it."""

    cuts: tuple[int, ...]
    trainer: str
    schedule: str | None = None

    def schedules(self, stages_per_rank: int) -> tuple[str, ...]:
        """What the trainer runs with so many stages on a rank; () where that is open."""
        if self.schedule:
            return (self.schedule,)
        if stages_per_rank > 1:
            return ("Interleaved1F1B",)
        return ("1F1B",) if self.trainer == "megatron" else ()


def read_split(text: str, layers: Layers) -> Split:
    """The split of a model whose layers have these names. Raises UsageError."""
    form, colon, rest = text.partition(":")
    reader = _READERS.get(form)
    if not colon or reader is None:
        raise UsageError(f"--from {text!r} is no split: write one of {', '.join(f'{name}:…' for name in _READERS)}")
    try:
        schedule = _schedule(Path(rest)) if form == "torchtitan" else None
        return Split(reader(rest, layers), form, schedule)
    except CannotExport as error:
        raise UsageError(f"--from {form}: {error}") from None


def _counts(text: str, layers: Layers) -> tuple[int, ...]:
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdecimal() for item in items):
        raise UsageError(f"--from counts:{text} is no list of numbers: write it as counts:18,15,15,13")
    return cuts_of_counts(tuple(map(int, items)), layers)


def _megatron(text: str, layers: Layers) -> tuple[int, ...]:
    stages, known = read_layout(text), parts(layers, "megatron")
    blocks = sum(part.role is Role.BLOCK for part in known)
    wanted = sum(stage.count("t") for stage in stages)
    if wanted != blocks:
        raise UsageError(f"the layout {text!r} has {wanted} t, the model {blocks} blocks: write one t for each")
    before = sum(part.role in (Role.EMBEDDING, Role.POSITIONS) for part in known)
    sizes = {"E": before, "t": 1, "L": len(layers) - before - blocks}
    ends = accumulate(sum(sizes[letter] for letter in stage) for stage in stages)
    return tuple(ends)[:-1]


def _torchtitan(text: str, layers: Layers) -> tuple[int, ...]:
    names = {module_name(part): index for index, part in enumerate(parts(layers, "torchtitan"))}
    stages = _literal(Path(text))
    given = [name for stage in stages for name in stage]
    for name in given:
        if name not in names:
            raise UsageError(f"{text}: {name!r} is no module of the model, which has {', '.join(names)}")
    if [names[name] for name in given] != [*range(len(layers))] or not all(stages):
        missing = next((name for name in names if name not in given), None)
        what = f"{missing!r} is forgotten" if missing else "a module is doubled or out of order, or a stage is empty"
        raise UsageError(f"{text}: {what}: list each module once, in order")
    return tuple(names[stage[0]] for stage in stages[1:])


def _literal(path: Path) -> Sequence[Sequence[str]]:
    """The list in a Python file: assigned to the field's name, or given as that keyword."""
    for value in _values(path, _FIELD):
        if isinstance(value, list) and all(isinstance(row, list) for row in value):
            return value
    raise FileError(f"{path} holds no {_FIELD} = [[…], …] of names")


def _schedule(path: Path) -> str | None:
    """The schedule that a Python file names, where it is one that autopipe has."""
    for value in _values(path, "pipeline_parallel_schedule"):
        with contextlib.suppress(UsageError):
            return kind(str(value)).name
    return None


def _values(path: Path, field: str) -> Iterator[Any]:
    """The literals that a Python file assigns to a name, or gives as that keyword; the file is never run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise FileError(f"{path} cannot be read as Python: {error}") from None
    for node in ast.walk(tree):
        if field in {name.lower() for name in _targets(node)}:
            with contextlib.suppress(ValueError):
                yield ast.literal_eval(node.value)  # type: ignore[attr-defined]  # _targets knows nodes with one


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.Assign):
        return [_name(target) for target in node.targets]
    return []


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


_READERS: dict[str, Callable[[str, Layers], tuple[int, ...]]] = {
    "megatron": _megatron,
    "counts": _counts,
    "torchtitan": _torchtitan,
}
