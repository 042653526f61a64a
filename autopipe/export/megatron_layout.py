"""Megatron's pipeline layout: ``Et*3|ttL`` is an embedding and three blocks, then two blocks and the loss.

``|`` stands between stages, in forward order; ``(body)*N`` and ``c*N`` repeat; commas mean nothing. The final norm runs
with the loss. Megatron's own parser takes empty stages and ``t*0``; here they are refused.
"""

from __future__ import annotations

import re
from itertools import groupby

from autopipe.core.errors import UsageError

_GROUP = re.compile(r"\(([^()]+)\)\*(\d+)")
_ONE = re.compile(r"([Etm|L])\*(\d+)")


def write_layout(stages: tuple[str, ...]) -> str:
    """The layout of stages that are spelt out: ``("Ettt", "ttL")`` → ``Ettt|ttL``; four and more are ``t*4``."""
    return "|".join("".join(_run(letter, len([*run])) for letter, run in groupby(stage)) for stage in stages)


def _run(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 3 else letter * count


def read_layout(text: str) -> tuple[str, ...]:
    """The stages spelt out, one letter a layer. Raises UsageError for what autopipe or Megatron cannot mean."""
    spelt = text.replace(",", "")
    for pattern in (_GROUP, _ONE):
        zero = next((match for match in pattern.finditer(spelt) if int(match.group(2)) == 0), None)
        if zero:
            raise UsageError(f"layout {text!r}: {zero.group(0)!r} repeats nothing: leave it out")
        spelt = pattern.sub(lambda match: match.group(1) * int(match.group(2)), spelt)
    stages = tuple(spelt.split("|"))
    _check(text, stages)
    return stages


def _check(text: str, stages: tuple[str, ...]) -> None:
    letters = "".join(stages)
    wrong = next((letter for letter in letters if letter not in "EtL"), None)
    if wrong == "m":
        raise UsageError(f"layout {text!r}: autopipe plans no multi-token prediction: leave out m")
    if wrong:
        raise UsageError(f"layout {text!r}: {wrong!r} is not E, t or L; repeat as t*3 or (tt|)*2, without spaces")
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        raise UsageError(f"layout {text!r}: stage {empty} is empty: give it a layer, or drop a |")
    if not re.fullmatch(r"Et+L", letters):
        raise UsageError(
            f"layout {text!r}: one E comes first and one L last, with t between; here are {letters.count('E')} E, "
            f"{letters.count('t')} t and {letters.count('L')} L"
        )
