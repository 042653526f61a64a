"""Small pieces of text that artefacts share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.core.table_csv import to_csv


def comment(lines: Iterable[str]) -> str:
    """Lines as comments of Python, shell and YAML."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def schedule_csv(plan: Plan) -> str:
    """The plan's table as torch's pipeline runtime loads it: a row a rank, a cell an action."""
    return to_csv(plan.schedule.parsed())


def placement(plan: Plan, trainer: str) -> str:
    """``loop`` (stage s on rank s mod p) or ``v`` (rank r holds r and 2p−1−r). Raises CannotExport for another."""
    ranks, found = plan.depth, plan.schedule.placement
    if found == tuple(stage % ranks for stage in range(len(found))) and len(found) % ranks == 0:
        return "loop"
    if found == (*range(ranks), *reversed(range(ranks))):
        return "v"
    raise CannotExport(
        f"{trainer} places stage s on rank s mod {ranks}, or in a V; the plan has stages 0, 1, … on ranks "
        f"{', '.join(map(str, found))}"
    )


def literal(rows: Sequence[Sequence[str]], indent: str) -> str:
    """Lists of names as Python or JSON writes them, a list a line, without the outer brackets."""
    return "".join(f"{indent}[{', '.join(quoted(name) for name in row)}],\n" for row in rows)


def quoted(name: str) -> str:
    """A name in double quotes, as Python, JSON and YAML read it."""
    return json.dumps(name, ensure_ascii=not name.isprintable())


def plain(text: str) -> str:
    """Text that ends no comment: a plan is a file from anywhere, and what is in it must never run."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def in_docstring(text: str) -> str:
    """Text that ends no docstring either."""
    return plain(text).replace("\\", "\\\\").replace('"', '\\"')
