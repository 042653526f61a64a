from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.core.errors import FileError, ScheduleError
from autopipe.core.table_csv import from_csv, read_csv, to_csv
from tests.synthetic import random_schedule


def test_the_text_is_torchs() -> None:
    table = from_csv("0F0,0F1,,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n", "mine")
    assert table.name == "mine"
    assert table.placement == (0, 1)
    assert to_csv(table) == "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n"


def test_torchs_pairs_are_one_after_the_other() -> None:
    assert to_csv(from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "pair")) == "0F0,0F1,0B0,0B1\n"


@given(st.integers(0, 2**32 - 1))
def test_any_table_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    table = random_schedule(rng, ranks=ranks, stages=ranks + rng.randint(0, 3), micro_batches=rng.randint(1, 4))
    assert from_csv(to_csv(table), "random") == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n0F1", "stage 0 has actions on rank 0 too"),
        ("0F0\n2F0", "no actions of stage 1"),
        ("", "no actions"),
        ("0F0,0SEND_F0", "'0SEND_F0' is not an action"),
    ],
)
def test_what_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text, "table")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    assert read_csv(tmp_path / "mine.csv").name == "mine"
    with pytest.raises(FileError, match="cannot be read"):
        read_csv(tmp_path / "other.csv")
