"""Paths as a file names them, relative to its own folder, and as the current folder sees them."""

from __future__ import annotations

import os
from pathlib import Path


def relative(path: str | Path | None, folder: Path) -> str | None:
    """A path as a file in ``folder`` names it, links to folders resolved as opening it will; None stays None."""
    if path is None:
        return None
    found = Path(path)
    return Path(os.path.relpath(found.parent.resolve() / found.name, folder.resolve())).as_posix()


def seen(path: str, folder: Path) -> str:
    """A path that a file in ``folder`` names, as the current folder sees it, or whole where that is shorter."""
    found = folder / path
    whole = os.path.join(found.parent.resolve(), found.name)
    return min(os.path.relpath(whole), whole, key=len)
