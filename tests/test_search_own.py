"""Planning two-way and asynchronous schedules: the best split by brute force, memory, bounds, what is allowed."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopipe
import autopipe.schedules
from autopipe import cli
from autopipe.core import files
from autopipe.core.cluster import Link
from autopipe.core.errors import AutopipeError, CannotExport, NoPlanFits, UsageError
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile, Tie
from autopipe.core.schedule import kind, kinds
from autopipe.export.writing import export_plan
from autopipe.planning.best import search
from autopipe.planning.outcome import outcome
from autopipe.planning.setting import Setting
from autopipe.planning.space import Space
from autopipe.simulate import simulate_plan
from autopipe.solvers.brute import splits
from tests.synthetic import chain, cluster

OWN = [k.name for k in kinds("own")]
STALE = [k.name for k in kinds("own") if k.asynchronous]
TWO_WAY = [k.name for k in kinds("own") if not k.asynchronous]
LINK = Link(0.01, 1e9)


def model(layers: int = 8, **options: object) -> Profile:
    options = {"parameter_bytes": 1000, "held_bytes": 100, "optimizer_s": 0.1, **options}
    return chain([1.0 + 0.1 * (n % 3) for n in range(layers)], **options)  # type: ignore[arg-type]


def planned(name: str, *, depth: int = 4, batch: int = 8, **options: object) -> Plan:
    profile = options.pop("profile", None) or model()
    return autopipe.plan(
        profile,
        cluster(depth, link=LINK),
        global_batch=batch,
        depths=[depth],
        schedules=[name],
        allow_stale=True,
        **options,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OWN)
def test_a_plan_is_whole_and_survives_its_file(name: str) -> None:
    plan = planned(name)
    assert plan.schedule.name == name
    assert plan.schedule.executor == "own"
    assert files.from_json(files.to_json(plan), Plan) == plan
    assert simulate_plan(plan).step_s == pytest.approx(plan.predicted.step_s)
    assert plan.lower_bound_s <= plan.predicted.step_s
    assert len(plan.parts) == 4
    assert len(plan.stages) == (8 if name in TWO_WAY else 4)
    assert name in str(plan)


@given(st.sampled_from([*TWO_WAY, *STALE]), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_it_is_the_best_split_and_no_bound_is_above_it(name: str, seed: int) -> None:
    rng = random.Random(seed)
    depth = rng.choice([2, 4] if name in TWO_WAY else [2, 3])
    layers = depth + rng.randint(0, 3)
    profile = chain(
        [rng.uniform(0.5, 2) for _ in range(layers)],
        parameter_bytes=[rng.randint(0, 200) for _ in range(layers)],
        held_bytes=[rng.randint(0, 300) for _ in range(layers)],
        output_elements=rng.randint(1, 20),
        optimizer_s=rng.choice([0.0, 0.2]),
    )
    limits = (rng.choice([2**40, 5000]),) * depth
    setting = Setting(profile, cluster(depth, link=Link(rng.choice([0.0, 0.1]), 1e3)), "adamw", limits, {})
    batches = rng.choice([2, 15]) * depth
    space = Space(setting, batches, (depth,), (1,), (1,), (kind(name),), "none")
    answer = search(space)
    assume(answer.best is not None)
    case = answer.best.case
    every = [outcome(case, positions) for positions in splits(case.ranges.pieces, case.parts)]
    fitting = [each for each in every if each.over_limit() is None]
    best_s = min(each.timeline.step_s for each in fitting)
    assert answer.best.found.step_s == pytest.approx(best_s)
    assert answer.lower_bound_s <= best_s * (1 + 1e-9)
    found = outcome(case, answer.best.found.positions)
    assert found.peak_bytes == pytest.approx(answer.best.found.bytes, abs=1)


def test_stale_schedules_must_be_allowed() -> None:
    with pytest.raises(UsageError, match=r"PipeDream trains on weights that are some updates old: .* --allow-stale"):
        autopipe.plan(model(), cluster(4), global_batch=8, schedules=["PipeDream"])
    every = autopipe.plan(model(), cluster(4, link=LINK), global_batch=8, depths=[4], schedules=["all"])
    names = {every.schedule.name, *(name for row in every.rejected for name in row.names)}
    assert not names & set(STALE)
    assert set(TWO_WAY) <= names


def test_allowed_ones_win_by_their_period_and_say_how_stale_they_are() -> None:
    plan = autopipe.plan(model(), cluster(4, link=LINK), global_batch=8, depths=[4], allow_stale=True)
    assert plan.schedule.name in STALE
    assert any("updates old" in note for note in plan.notes)
    late = autopipe.plan(
        model(), cluster(4, link=LINK), global_batch=8, schedules=["2BW"], depths=[4], allow_stale=True
    )
    assert any("stages 0 … 3 are 1 1 1 1 updates old" in note for note in late.notes)


def test_versions_and_replicas_need_memory() -> None:
    """Weights of 8000 bytes in all: two versions on every rank, or both replicas' parts with their optimizer."""
    need = {name: max(planned(name).predicted.peak_bytes) for name in ("PipeDream-2BW", "DualPipe")}
    plain = autopipe.plan(model(), cluster(4, link=LINK), global_batch=8, depths=[4], schedules=["1F1B"])
    state = max(stage.costs.parameter_bytes for stage in plain.stages)
    assert need["PipeDream-2BW"] >= max(plain.predicted.peak_bytes) + state - 500
    assert need["DualPipe"] >= 2 * 4 * state
    for name, peak in need.items():
        with pytest.raises(NoPlanFits):
            planned(name, memory_bytes=peak * 3 // 4, headroom=0.0)


def test_tied_parameters_on_several_ranks_are_refused() -> None:
    tied = model(ties=[Tie("wte", (0, 7), 500)])
    with pytest.raises(UsageError, match="wte is tied: its stages would have to step together"):
        planned("PipeDream", profile=tied)
    assert planned("Chimera", profile=tied).schedule.name == "Chimera"


def test_pipemare_does_not_recompute() -> None:
    with pytest.raises(UsageError, match="a forward that runs again would meet other weights"):
        planned("PipeMare", recompute="all")


def test_the_plan_command_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """docs/asynchronous.md, with a profile in the model's place."""
    page = (Path(__file__).parents[1] / "docs" / "asynchronous.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("autopipe plan model.py"))
    monkeypatch.chdir(tmp_path)
    files.write(model(micro_batches=(1, 2)), "model.profile.json")
    files.write(cluster(4, link=LINK), "cluster.json")
    arguments = command.replace("model.py", "model.profile.json --cluster cluster.json").split()
    for argv, code in ((arguments, 0), ([a for a in arguments if a != "--allow-stale"], 2)):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert (end.value.code or 0) == code
    said = capsys.readouterr()
    assert "PipeDream-2BW · 4 stages" in said.out
    assert "autopipe plan --allow-stale allows that" in said.err


def test_the_period_of_equal_stages_is_their_work() -> None:
    """m (F + B) and the optimizer's step: nothing fills or drains, and messages take no time here."""
    profile = chain([1.0] * 8, optimizer_s=0.1)
    for name in STALE:
        how = {"global_batch": 8, "depths": [4], "schedules": [name], "allow_stale": True}
        plan = autopipe.plan(profile, cluster(4), **how)
        assert plan.predicted.step_s == pytest.approx(8 * 2 * (1 + 2) + 2 * 0.1)
        assert plan.gap == pytest.approx(0.0)
        assert plan.predicted.idle == pytest.approx(0.0)
        assert plan.limited_by.startswith("stage")


def test_the_period_is_the_round_trip_of_those_in_flight_where_links_are_slow() -> None:
    """The first of four stages has four in flight: each is away for all F and B, and six messages."""
    how = {"global_batch": 8, "depths": [4], "schedules": ["2BW"], "allow_stale": True, "micro_batches": [1]}
    plan = autopipe.plan(chain([1.0] * 4), cluster(4, link=Link(0.5, 1e18)), **how)
    assert plan.predicted.step_s == pytest.approx(8 * (4 * 3 + 6 * 0.5) / 4)
    assert plan.gap == pytest.approx(0.0)
    assert plan.limited_by == "stage 0, layers.0 alone"


def test_a_two_way_plan_wins_where_memory_allows_it() -> None:
    """At m = p Chimera idles (p − 2) forwards less than 1F1B, and holds every part twice."""
    how = {"global_batch": 4, "depths": [4], "schedules": ["1F1B", "Chimera"], "headroom": 0.0}
    profile = chain([1.0] * 8, parameter_bytes=1000)
    free = autopipe.plan(profile, cluster(4), **how)
    assert free.schedule.name == "Chimera"
    assert autopipe.plan(profile, cluster(4), memory_bytes=12_000, **how).schedule.name == "1F1B"


def test_summing_the_gradients_of_both_ways_takes_time() -> None:
    """Half of a stage's bytes go each way, and come back: 2 (latency + bytes / 2 / rate) for each of a rank's two."""
    profile = chain([1.0] * 4, parameter_bytes=1000)
    slow = planned("DualPipe", depth=2, profile=profile)
    sums = [2 * (0.01 + stage.costs.gradient_bytes / 2 / 1e9) for stage in slow.stages]
    assert [stage.costs.reduce_s for stage in slow.stages] == pytest.approx(sums)
    assert slow.stages[0].costs.optimizer_s == 0.0


def test_a_two_way_pipeline_takes_a_micro_batch_each_way() -> None:
    with pytest.raises(AutopipeError, match="it takes two micro-batches or more, one each way"):
        planned("Chimera", depth=2, batch=1)


def test_pins_name_parts_of_a_two_way_pipeline() -> None:
    plan = planned("Chimera", pins={"layers.2": 0, "layers.3": 1})
    assert plan.cuts[0] == 3
    assert [(stage.start, stage.stop) for stage in plan.stages[4:]] == [(s.start, s.stop) for s in plan.parts]


def test_replicas_do_not_go_without_a_flush() -> None:
    with pytest.raises(UsageError, match="its replicas would have to step together"):
        autopipe.plan(
            model(), cluster(4), global_batch=8, depths=[2], replicas=[2], schedules=["2BW"], allow_stale=True
        )


@pytest.mark.parametrize("name", ["PipeDream", "Chimera"])
def test_trainers_have_none_of_them(name: str, tmp_path: Path) -> None:
    planned(name).save(tmp_path / "plan.json")
    with pytest.raises(CannotExport, match=f"has no {name}, which autopipe's own runtime trains with"):
        export_plan(tmp_path / "plan.json", "torch", tmp_path / "out", allow_lossy=True)
    assert not (tmp_path / "out").exists()


def test_layers_recompute_where_the_versions_leave_too_little() -> None:
    """Two versions of the weights stay; of 8 micro-batches' activations in flight only the inputs do."""
    profile = model(held_bytes=4000)
    free = planned("2BW", profile=profile, headroom=0.0)
    limit = max(free.predicted.peak_bytes) * 2 // 3
    tight = planned("2BW", profile=profile, headroom=0.0, memory_bytes=limit)
    assert max(tight.predicted.peak_bytes) <= limit
    assert any(stage.recompute for stage in tight.stages)
    assert tight.predicted.step_s > free.predicted.step_s
    assert tight.lower_bound_s <= tight.predicted.step_s
    assert simulate_plan(tight).peak_bytes == tight.predicted.peak_bytes
    with pytest.raises(NoPlanFits, match="--recompute auto"):
        planned("2BW", profile=profile, headroom=0.0, memory_bytes=limit, recompute="none")
