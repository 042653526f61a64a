"""The blocks of a model by their names: ``model.layers.3`` is block 3."""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(?:^|\.)(\d+)\Z")


def block_number(layer: str) -> int | None:
    """The number of a numbered module, None for another."""
    match = _NUMBERED.search(layer)
    return int(match.group(1)) if match else None
