"""Profiles that others measured, as Profiles: one file a format.

Each importer is ``read(text, facts) -> Profile``. What a file does not say (the batch size, the device) is asked for by
the name of the option that says it; see Facts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopipe.core.errors import UsageError
from autopipe.core.files import read_text
from autopipe.core.profile import Profile
from autopipe.importers import pipedream, table
from autopipe.importers.facts import Facts

__all__ = ["IMPORTERS", "Facts", "format_of", "import_profile"]

IMPORTERS: dict[str, Callable[[str, Facts], Profile]] = {"pipedream": pipedream.read, "table": table.read}
"""The importers, by the name of their format."""

_SUFFIXES = {".txt": "pipedream", ".csv": "table", ".tsv": "table"}


def format_of(path: str, name: str | None = None) -> str | None:
    """The format of a file: the one that is named, else the one that its ending tells; None where neither does.

    Raises UsageError for a name that is not known.
    """
    if name is not None and name not in IMPORTERS:
        raise UsageError(f"--from {name!r} is not known: use one of {', '.join(IMPORTERS)}")
    return name or _SUFFIXES.get(Path(path).suffix.lower())


def import_profile(path: str, name: str, facts: Facts) -> Profile:
    """The Profile in a file of the named format. Raises FileError for its lines, UsageError for what it lacks."""
    return IMPORTERS[name](read_text(path), facts)
