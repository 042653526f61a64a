"""Under torchrun every process runs the same command: one of them prints, and writes what is wanted once."""

from __future__ import annotations

import os


def is_first() -> bool:
    """Whether this is torchrun's rank 0, or not under torchrun at all."""
    return "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0"
