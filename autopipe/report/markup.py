"""The few pieces that pages are made of. Text is escaped here; only the cells of ``table`` are HTML already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from autopipe.report.rows import Row, clean

_OPERATIONS = {"F": "forward", "B": "backward", "W": "weight gradient", "O": "optimizer", "M": "message"}


def said(text: str) -> str:
    """Text as HTML: nothing in it is read as markup, and what does not print is an escape."""
    return escape(clean(text))


def section(heading: str, key: str, content: str) -> str:
    """A part of the page, with the anchor ``key``."""
    return f'<section id="{key}"><h2>{said(heading)}</h2>\n{content}</section>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Numbers at a glance: what, the number, and a word on it."""
    each = (
        f"<div><dt>{said(what)}</dt><dd>{said(n)}<small>{said(word)}</small></dd></div>" for what, n, word in figures
    )
    return f'<dl class="cards">{"".join(each)}</dl>'


def table(
    headers: Row,
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[int] = (),
    names: Sequence[int] = (),
    wraps: Sequence[int] = (),
    cut_before: Sequence[int] = (),
) -> str:
    """A table that scrolls by itself where the page is narrow; numbers to the right.

    Columns in ``left`` are aligned left, those in ``names`` hold names of a model, those in ``wraps`` may break.
    Rows in ``cut_before`` have a line above them.
    """
    kinds = {"left": {*left, *names, *wraps}, "name": {*names}, "wrap": {*wraps}}
    marks = [" ".join(kind for kind, columns in kinds.items() if i in columns) for i in range(len(headers))]
    opening = [f'<td class="{mark}">' if mark else "<td>" for mark in marks]
    head = "".join(
        f'<th scope="col" class="{mark}">{said(text)}</th>' for text, mark in zip(headers, marks, strict=True)
    )
    body = "\n".join(
        f"<tr{' class=cut' if number in cut_before else ''}>"
        + "".join(f"{begin}{cell}</td>" for begin, cell in zip(opening, row, strict=True))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def rows_table(headers: Row, rows: Iterable[Row], *, left: Sequence[int] = ()) -> str:
    """A table of plain text."""
    return table(headers, [[*map(said, row)] for row in rows], left=left)


def bar(parts: Iterable[tuple[str, float]]) -> str:
    """Parts of a whole side by side, each with the fill of an operation's letter; the numbers stand in the cells."""
    pieces = (f'<i class="{kind}" style="width:{100 * min(1.0, part):.2f}%"></i>' for kind, part in parts if part > 0)
    return f'<span class="bar" aria-hidden="true">{"".join(pieces)}</span>'


def legend(kinds: Mapping[str, str] | str) -> str:
    """What the fills of bars mean: letters of operations, or a text for each fill."""
    meanings = kinds if isinstance(kinds, Mapping) else {kind: _OPERATIONS[kind] for kind in kinds}
    each = (f"<span>{bar([(kind, 1.0)])}{said(text)}</span>" for kind, text in meanings.items())
    return f'<div class="legend">{"".join(each)}</div>'
