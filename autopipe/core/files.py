"""Profiles, clusters, plans, timelines, check results and stages' seconds as versioned JSON files.

    {"format": "autopipe.plan", "version": 1, …the fields of the dataclass…}

Reading never executes anything. A field that is unknown, missing, of another type, negative where it is a time or a
size, NaN or infinite is refused with its path; a version of the future is refused by number. Writing goes through a
temporary file in the same folder, so that a file is whole or as it was.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin

import cattrs
from cattrs.cols import homogenous_tuple_structure_factory

from autopipe.core.cluster import Cluster
from autopipe.core.errors import AutopipeError, FileError
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile
from autopipe.core.result import CheckResult, Rehearsal
from autopipe.core.schedule import Action
from autopipe.core.stage_seconds import StageSeconds
from autopipe.core.timeline import Memory, Span, Timeline

VERSION = 1
_FORMATS: dict[type, str] = {
    Plan: "autopipe.plan",
    Profile: "autopipe.profile",
    Cluster: "autopipe.cluster",
    Timeline: "autopipe.timeline",
    CheckResult: "autopipe.check",
    Rehearsal: "autopipe.rehearsal",
    StageSeconds: "autopipe.costs",
}
File = Plan | Profile | Cluster | Timeline | CheckResult | Rehearsal | StageSeconds
T = TypeVar("T", Plan, Profile, Cluster, Timeline, CheckResult, Rehearsal, StageSeconds)


def write(value: File, path: str | Path) -> None:
    """Write the file, whole or not at all. Raises FileError where it cannot be written."""
    write_text(to_json(value), path)


def read(path: str | Path, kind: type[T]) -> T:
    """Read a file of one kind. Raises FileError that names the file, the field and what to do."""
    return from_json(read_text(path), kind, str(path))


def read_text(path: str | Path) -> str:
    """A file's text. Raises FileError where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None


def load(path: str | Path) -> Plan:
    """The Plan in a file, as ``autopipe.load``. Raises FileError that names the file, the field and what to do."""
    return read(path, Plan)


def check_path(plan: str | Path) -> Path:
    """Where the result of checking a plan file lies: ``plan.check.json`` beside ``plan.json``."""
    return Path(plan).with_suffix(".check.json")


def rehearsal_path(plan: str | Path) -> Path:
    """Where the result of rehearsing a plan file lies: ``plan.rehearsal.json`` beside ``plan.json``."""
    return Path(plan).with_suffix(".rehearsal.json")


def write_text(text: str, path: str | Path) -> None:
    """Replace a file's content in one step. Raises FileError where it cannot be written."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from None


def to_json(value: File) -> str:
    """The file's text."""
    return json_text(as_object(value))


def as_object(value: File) -> dict[str, Any]:
    """The file's object."""
    head: dict[str, Any] = {"format": _FORMATS[type(value)], "version": VERSION}
    fields_: dict[str, Any] = plain(value)
    return head | fields_


def json_text(content: Any) -> str:
    """Plain data as the files are written: one space a level, nothing that JSON does not know."""
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as JSON holds them; actions as their text, spans as short lists."""
    if isinstance(value, Action):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def from_json(text: str, kind: type[T], where: str = "the text") -> T:
    """The value that a file's text holds. ``where`` is what messages call it. Raises FileError."""
    content = _parsed(text, where)
    _check_head(content, kind, where)
    for path, problem in _bad_numbers(content, "$"):
        raise FileError(f"{where}: {path} {problem}")
    body = {key: value for key, value in content.items() if key not in ("format", "version")}
    try:
        return _CONVERTER.structure(body, kind)
    except cattrs.BaseValidationError as error:
        said = map(_placed, cattrs.transform_error(error, format_exception=_said)[:3])
        raise FileError(f"{where}: {'; '.join(said)}") from None
    except AutopipeError as error:
        raise FileError(f"{where}: {error}") from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{where} is not whole JSON (line {error.lineno}, column {error.colno}: {error.msg}): write it again"
        ) from None
    except RecursionError:
        raise FileError(f"{where} is nested too deeply") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise FileError(f"{where} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise FileError(f"{where} holds a {type(content).__name__}, not an object")
    return content


def _check_head(content: dict[str, Any], kind: type, where: str) -> None:
    wanted, found, version = _FORMATS[kind], content.get("format"), content.get("version")
    if found != wanted:
        raise FileError(f"{where} has format {found!r}, {wanted!r} is needed")
    if type(version) is not int or version < 1:
        raise FileError(f"{where} has version {version!r}, a number from 1 to {VERSION} is needed")
    if version > VERSION:
        raise FileError(f"{where} has version {version}, this autopipe reads up to {VERSION}: install a newer one")


def _bad_numbers(value: Any, path: str, quantity: bool = False) -> Iterator[tuple[str, str]]:
    """Where a number is not finite, or negative though it is a time or a size."""
    if isinstance(value, dict):
        for key, item in value.items():
            quantity = key.endswith(("_s", "bytes")) or key in ("memory", "parameters", "spread", "noise")
            yield from _bad_numbers(item, f"{path}.{key}", quantity)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _bad_numbers(item, f"{path}[{index}]", quantity)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"is {value}, it must be a finite number"
    elif quantity and isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        yield path, f"is {value}, it cannot be negative"


def _placed(said: str) -> str:
    """What cattrs says of a field, behind the field's path; the whole file needs none."""
    said, _, path = said.rpartition(" @ ")
    return said if path == "$" else f"{path}: {said}"


def _said(error: BaseException, kind: type | None) -> str:
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"unknown field {', '.join(sorted(map(repr, error.extra_fields)))}"
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return str(error).partition("\n")[0]  # a schedule's error goes on with its table


def _strict(value: Any, kind: Any) -> Any:
    """Primitives as they are: no text for a number, no fraction for a count."""
    if type(value) is kind or (kind is float and type(value) is int):
        return kind(value)
    raise TypeError(f"must be {kind.__name__}, not {type(value).__name__} {value!r}")


def _dimension(value: Any, _: Any) -> int | str:
    return value if type(value) is int else str(_strict(value, str))


def _row(*kinds: type) -> Callable[[Any, Any], Any]:
    """A hook for a NamedTuple that the file holds as a list of its fields."""

    def structure(value: Any, row: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(kinds):
            raise TypeError(f"must be a list of {len(kinds)}: {', '.join(row._fields)}")
        return row(*(_CONVERTER.structure(item, kind) for item, kind in zip(value, kinds, strict=True)))

    return structure


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _list_only(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """A hook for tuples that takes nothing but a list: text and objects can be iterated, too."""
    structure = homogenous_tuple_structure_factory(kind, converter)

    def strict(value: Any, kind: Any) -> Any:
        return structure(_strict(value, list), kind)

    return strict


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for primitive in (int, float, str, bool):
        converter.register_structure_hook(primitive, _strict)
    converter.register_structure_hook_factory(_is_tuple, _list_only)
    converter.register_structure_hook(int | str, _dimension)
    converter.register_structure_hook(Action, lambda value, _: Action.parse(_strict(value, str)))
    converter.register_structure_hook(Span, _row(int, Action, float, float))
    converter.register_structure_hook(Memory, _row(float, int))
    return converter


_CONVERTER = _converter()
