"""The explorer: figures against closed forms, caps, files of costs and tables, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.errors import FileError, NoPlanFits, UsageError
from autopipe.core.schedule import Action, Shape, kind
from autopipe.core.stage_seconds import StageSeconds
from autopipe.core.table_csv import to_csv
from autopipe.core.timeline import Span, Timeline
from autopipe.exploring import examine, explore, stage_seconds
from autopipe.report.explored import explored_html, explored_text
from autopipe.report.lanes import lanes


def equal(stages: int, forward: float = 1, input_grad: float = 1, weight_grad: float = 1, hop: float = 0):
    return StageSeconds.equal(
        stages, forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad, transfer_s=hop
    )


def test_1f1b_at_equal_stages() -> None:
    found = explore("1f1b", equal(4), ranks=4, micro_batches=8)
    assert found.schedule.name == "1F1B"
    assert found.makespan_s == 8 * 3 + 3 * 3
    assert found.timeline.idle == pytest.approx(9 / 33)
    assert found.stage_time_s == 33  # rank 0 works from the first forward to the last backward
    assert found.stage_idle == pytest.approx(9 / 33)
    assert found.peak_in_flight == (4, 3, 2, 1)
    assert found.lower_bound_s == 8 * 3 + 3  # a split backward could fill the rest
    assert found.gap == pytest.approx(33 / 27 - 1)


def test_zb_h2_idles_less_by_its_own_time_than_by_the_step() -> None:
    found = explore("ZB-H2", equal(4), ranks=4, micro_batches=8)
    assert found.makespan_s == 27
    assert (found.stage_time_s, found.stage_idle) == (24, 0)
    assert found.timeline.idle == pytest.approx(3 / 27)


def test_transfers_inside_a_rank_are_free() -> None:
    """On one rank nothing is sent: hops cost nothing."""
    found = explore("ZB-V", equal(2, 1, 1, 1, hop=5), ranks=1, micro_batches=3)
    assert found.makespan_s == 3 * 2 * 3


def test_a_cap_that_is_too_low_names_both_numbers() -> None:
    with pytest.raises(NoPlanFits, match=r"1F1B holds 4 .* on rank 0, the cap is 3\. Try --memory-cap 4"):
        explore("1F1B", equal(4), ranks=4, micro_batches=8, memory_cap=3)


def test_synthesized_keeps_to_the_cap() -> None:
    found = explore("Synthesized", equal(4, 2, 3, 1, hop=0.1), ranks=2, micro_batches=6, memory_cap=1.5)
    assert max(found.peak_in_flight) <= 1.5
    assert found.schedule.name == "Synthesized"
    assert found.lower_bound_s <= found.makespan_s


def test_the_better_placement_is_shown() -> None:
    """Three stages' worth of forwards before the second rank gets anything: a loop starts it after one stage."""
    costs = StageSeconds((1, 1, 9, 1), (1, 1, 9, 1), (1, 1, 9, 1))
    found = explore("Synthesized", costs, ranks=2, micro_batches=4)
    for placement in ((0, 1, 1, 0), (0, 1, 0, 1)):
        shape = Shape(2, 4, placement)
        assert (
            found.makespan_s
            <= examine(kind("Synthesized").table(shape, costs.times()), shape, costs.times()).makespan_s
        )


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "batches", "message"),
    [
        ("ZB-V", 4, 4, 8, "ZB-V takes 2 stages a rank, not 1"),
        ("1F1B", 6, 4, 8, "6 stages cannot be shared equally by 4 ranks: use --stages 4"),
        ("DualPipeV", 8, 4, 6, "DualPipeV cannot run 6 micro-batches on 4 ranks"),
        ("1F2B", 4, 4, 8, "schedule '1F2B' is not known"),
    ],
)
def test_impossible_shapes_are_told(name: str, stages: int, ranks: int, batches: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explore(name, equal(stages), ranks=ranks, micro_batches=batches)


def test_a_table_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(kind("ZB-H1").schedule(4, 8)))
    found = explore(str(path), equal(4), ranks=4, micro_batches=8)
    assert (found.schedule.name, found.makespan_s) == ("mine", 27)
    with pytest.raises(UsageError, match=r"mine.csv is for 4 ranks, 4 stages and 8 micro-batches, not 2, 4 and 8"):
        explore(str(path), equal(4), ranks=2, micro_batches=8)
    assert stage_seconds(str(path), 4, None, ("1s", "1s", "1s", None), None).stages == 4


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    uneven = StageSeconds((1, 2), (1, 1), (1, 1), transfer_s=(0.5,))
    files.write(uneven, path)
    assert stage_seconds("1F1B", 2, None, (None,) * 4, path) == uneven
    with pytest.raises(UsageError, match="leave out --forward"):
        stage_seconds("1F1B", 2, None, ("1ms", None, None, None), path)
    with pytest.raises(UsageError, match=r"costs.json has 2 stages, --stages says 3"):
        stage_seconds("1F1B", 2, 3, (None,) * 4, path)
    path.write_text(path.read_text().replace("0.5", "0.5, 1"))
    with pytest.raises(FileError, match=r"costs.json: forward_s has 2 stages, .* and transfer_s 2 hops"):
        stage_seconds("1F1B", 2, None, (None,) * 4, path)


def test_seconds_that_are_missing_are_told() -> None:
    with pytest.raises(UsageError, match="seconds are missing: give --forward, --input-grad and --weight-grad"):
        stage_seconds("1F1B", 2, None, ("1ms", "1ms", None, None), None)


def test_the_backward_of_a_file_counts(tmp_path: Path) -> None:
    costs = StageSeconds((1.0,), (1.0,), (1.0,), backward_s=(1.5,))
    assert explore("GPipe", costs, ranks=1, micro_batches=2).makespan_s == 2 * 2.5


def test_json_holds_what_was_asked_for() -> None:
    content = json.loads(explore("1F1B", equal(2), ranks=2, micro_batches=2).to_json())
    assert content == {
        "schedule": "1F1B",
        "makespan_s": 9,
        "stage_time_s": 9,
        "idle": pytest.approx(1 / 3),
        "stage_idle": pytest.approx(1 / 3),
        "peak_in_flight": [2, 1],
        "lower_bound_s": 7,
        "placement": [0, 1],
        "order": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    }


def test_the_text_is_the_figures_and_the_lanes() -> None:
    text = explored_text(explore("1F1B", equal(2), ranks=2, micro_batches=2), width=25)
    assert text.splitlines() == [
        "schedule   1F1B · 2 ranks · 2 stages · 2 micro-batches",
        "makespan   9.00 s · 33.3 % idle",
        "           within 28.6 % of the bound of 7.00 s",
        "stage time 9.00 s · 33.3 % idle",
        "in flight  2 1 micro-batches' activations, by rank",
        "",
        "rank 0 FFFF····BBBB··BBBB",
        "rank 1 ··FFBBBBFFBBBB····",
    ]


def test_a_column_of_the_lanes_shows_what_takes_most_of_it() -> None:
    spans = [("0F0", 0, 1.6), ("0B0", 1.6, 2), ("0F1", 2.4, 2.9), ("0W0", 3.4, 4)]
    line = Timeline(1, tuple(Span(0, Action.parse(a), s, e) for a, s, e in spans), ((),), 4)
    assert lanes(line, width=11) == "rank 0 FFFW"
    assert lanes(Timeline(1, (), ((),), 0.0), width=9) == "rank 0 ··"


def test_the_page_names_what_it_shows_and_loads_nothing() -> None:
    text = explored_html(explore("ZB-H1", equal(2), ranks=2, micro_batches=2))
    assert text.count("<title>1W1 ") == 1
    assert "2 ranks · 2 stages · 2 micro-batches" in text
    assert "optimizer" not in text.partition('<g class="key">')[2]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
