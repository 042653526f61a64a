"""What is printed: golden files, and that the columns add up to the totals.

``UPDATE_GOLDEN=1 pytest tests/test_terminal.py`` writes the files anew; read the difference before keeping it.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from autopipe.core import units
from autopipe.core.plan import Rejected
from autopipe.core.schedule import Action, Op, Schedule
from autopipe.report import terminal
from tests.samples import check_result, cluster, plan, profile, rehearsal

GOLDEN = Path(__file__).parent / "golden"
TEXTS = {
    "plan": lambda: terminal.plan_text(plan(), profile=profile(), cluster=cluster(), measured=check_result()),
    "plan_alone": lambda: terminal.plan_text(plan()),
    "check": lambda: terminal.check_text(check_result(), plan=plan()),
    "check_alone": lambda: terminal.check_text(check_result()),
    "rehearsal": lambda: terminal.rehearsal_text(rehearsal()),
    "profile": lambda: terminal.profile_text(profile()),
    "schedule": lambda: terminal.schedule_text(plan().schedule.parsed()),
    "cluster": lambda: terminal.cluster_text(cluster()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_golden_one(name):
    path, text = GOLDEN / f"{name}.txt", TEXTS[name]() + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", TEXTS)
def test_no_line_is_wider_than_asked_nor_ends_in_blanks(name):
    for line in TEXTS[name]().splitlines():
        assert cell_len(line) <= 100
        assert line == line.rstrip()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_width_is_kept(width):
    long = replace(plan(), rejected=(Rejected("another way " * 9, "a reason that is long " * 9, 1.0, 0.5, 1),))
    assert max(map(cell_len, terminal.plan_text(long, width=width).splitlines())) <= width


def test_ways_to_one_plan_are_one_row_with_all_their_names():
    rules = ("equal parameters, 1F1B", "torchtitan's split, 1F1B", "PipeDream's split, 1F1B", "micro-batch 8")
    same = Rejected("equal layers, 1F1B", "+7.0 %", 1.0, 0.5, 1, also=rules)
    other = Rejected("one device, no pipeline", "+8.0 %", 1.0, 0.5, 1)
    lines = terminal.plan_text(replace(plan(), rejected=(same, other))).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("why not"))
    assert [line[:34].rstrip() for line in lines[start + 1 : start + 5]] == [
        "equal layers / equal parameters /",
        "  torchtitan's split / PipeDream's",
        "  split, 1F1B / micro-batch 8",
        "one device, no pipeline",
    ]
    assert lines[start + 1].endswith("+7.0 %")


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the rows under a header line, up to the next blank line; cells are two blanks apart."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    found = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        found.append(re.split(r" {2,}", line.strip()))
    return found


def test_the_layers_add_up_to_the_total():
    *layers, total = rows(TEXTS["profile"](), "layer  ")
    assert len(layers) == len(profile().layers)
    for column, parse in ((2, units.parse_bytes), (3, units.parse_duration), (4, units.parse_duration)):
        assert sum(parse(row[column]) for row in layers) == pytest.approx(parse(total[column - 1]), rel=5e-3)
    assert sum(units.parse_bytes(row[5]) for row in layers) == pytest.approx(units.parse_bytes(total[4]), rel=5e-3)
    assert sum(units.parse_duration(row[7]) for row in layers) == pytest.approx(
        units.parse_duration(total[5]), rel=5e-3
    )


def test_the_totals_are_those_of_the_size_table():
    text = TEXTS["profile"]()
    total = rows(text, "layer  ")[-1]
    assert rows(text, "micro-batch  ")[-1][1:] == [total[2], total[3], "21.9 ms", total[4]]


def test_the_stages_add_up_to_the_plan():
    text = TEXTS["plan"]()
    stages = [row for row in rows(text, "stage  ") if row[0].isdecimal()]
    idle = [float(row[-1].rstrip(" %")) for row in stages]
    assert sum(idle) / 2 == pytest.approx(100 * plan().predicted.idle, abs=0.1)
    assert f"{plan().predicted.idle:.1%}".replace("%", " %") + " idle" in text
    weights = sum(units.parse_bytes(row[5]) for row in stages) - sum(tie.bytes for tie in plan().ties)
    assert weights == pytest.approx(4 * profile().parameters, rel=5e-3)


def test_the_bar_is_the_part_of_the_limit():
    peak, limit = plan().predicted.peak_bytes[0], plan().memory_limit_bytes[0]
    assert rows(TEXTS["plan"](), "stage  ")[0][6].count("█") == round(10 * peak / limit)


def test_every_rejected_way_is_listed_with_its_reason():
    listed = rows(TEXTS["plan"](), "why not")
    assert [(row[0], row[-1]) for row in listed] == [(other.what, other.reason) for other in plan().rejected]
    assert listed[-1][1:4] == ["–", "–", "–"]


def test_a_check_shows_the_errors_that_its_numbers_have():
    result = check_result()
    row = rows(TEXTS["check"](), "                    predicted")[0]
    assert row[:4] == ["step", *map(units.format_duration, (plan().predicted.step_s, result.measured.step_s)), "+2.0 %"]


def test_a_plan_says_whether_it_was_checked():
    failed = replace(check_result(), parity=replace(check_result().parity, passed=False))
    assert "parity FAILED" in terminal.plan_text(plan(), measured=failed)
    assert "another plan than this one" in terminal.plan_text(replace(plan(), noise=0.5), measured=check_result())
    assert "not yet" in terminal.plan_text(plan())


def test_a_loss_that_is_no_number_is_printed_as_such():
    parity = replace(check_result().parity, passed=False, losses=(float("nan"),), max_loss_difference=float("inf"))
    text = terminal.check_text(replace(check_result(), parity=parity))
    assert "losses differ by NaN" in text
    assert "losses    NaN" in text


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/]", "a\x1b[31mb", "a\nb", "a\tb", "[link=file:///etc]x[/link]"])
def test_names_are_data(name):
    layers = (replace(profile().layers[0], name=name), *profile().layers[1:])
    named = replace(profile(), model=name, layers=layers)
    stages = (replace(plan().stages[0], layers=(name, "h.1")), plan().stages[1])
    renamed = replace(plan(), stages=stages, model=replace(plan().model, name=name), limited_by=name, notes=(name,))
    printed = name.encode("unicode_escape").decode() if not name.isprintable() else name
    for text in (terminal.profile_text(named), terminal.plan_text(renamed)):
        assert printed[:16] in text
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text.splitlines()) <= len(TEXTS["plan"]().splitlines()) + 2


def test_rank_columns_stand_once_for_a_rank_with_two_stages():
    first, second = plan().stages
    order = tuple(
        tuple(Action(s, op, m) for m in range(4) for op, s in steps)
        for steps in [((Op.F, 0), (Op.F, 1), (Op.B, 1), (Op.B, 0))]
    )
    table = plan().schedule.of(Schedule("looped", (0, 0), order))
    looped = replace(plan(), schedule=table, stages=(first, replace(second, rank=0)), hops=(None,), depth=1)
    stages = rows(terminal.plan_text(looped), "stage  ")
    assert [len(row) for row in stages[:2]] == [8, 6]


def test_long_layer_names_keep_their_ends_and_the_row():
    names = tuple(f"model.language_model.decoder.layers.{i}" for i in range(3))
    stages = (replace(plan().stages[0], layers=names), replace(plan().stages[1], layers=names[2:]))
    first, second = rows(terminal.plan_text(replace(plan(), stages=stages)), "stage  ")[:2]
    assert first[2] == "…_model.decoder.layers.0 … 2"
    assert second[2] == "…uage_model.decoder.layers.2"
    assert len(first) == len(second) == 8


def test_a_long_schedule_is_cut_to_the_width():
    order = (tuple(Action(0, op, m) for m in range(300) for op in (Op.F, Op.B)),)
    text = terminal.schedule_text(Schedule("x", (0,), order), width=60)
    assert [len(line) <= 60 for line in text.splitlines()] == [True, True]
    assert text.endswith("…")


def test_colour_is_for_terminals(capsys, monkeypatch):
    text = TEXTS["plan"]()
    terminal.show(text)
    assert capsys.readouterr().out == text + "\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal.show(text)
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text + "\n"


def test_show_prints_markup_as_it_is(capsys):
    terminal.show("[bold]x[/bold] [/] :smile:")
    assert capsys.readouterr().out == "[bold]x[/bold] [/] :smile:\n"
