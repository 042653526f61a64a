"""docs/models.md lists what the tests train; UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

from tests.models import ZOO, Case

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models that are tested

Each is small, written as its author would write it, and runs with nothing but the three functions of a model file. Its
stages train with the losses, gradients and buffers of one process: in a chain in one process with random cuts,
recomputation, deferred weight gradients and micro-batch sizes, and on 2, 3 and 4 real ranks with 1F1B and with split
backwards (tests/runtime/test_stages.py and test_zoo_parity.py; `make test-all` runs all of it).

| model | result |
|---|---|
"""


def _result(case: Case) -> str:
    if case.refused:
        return "refused when it is planned, naming file and line"
    parts = ["trains"] if not case.unplanned else [f"stages train, but planning refuses it: {case.unplanned}"]
    if case.whole:
        parts.append(f"kept whole: {', '.join(f'`{name}`' for name in case.whole)}")
    if case.fixed:
        parts.append("one micro-batch size only")
    return "; ".join(parts)


def test_the_page_lists_the_zoo() -> None:
    text = HEAD + "".join(f"| {name.replace('_', ' ')} | {_result(case)} |\n" for name, case in ZOO.items())
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text
