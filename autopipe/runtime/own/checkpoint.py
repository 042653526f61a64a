"""What an asynchronous run keeps beside weights and optimizer, so that it can go on with other cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks' training as one; empty where there was none."""
    if not parts or not parts[0]:
        return {}
    changes = {name: value for part in parts for name, value in part["change"].items()}
    return {"updates": parts[0]["updates"], "change": changes}
