"""Tuning without running anything: what is tried next, what trials teach, and what the folder keeps."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial

import pytest

import autopipe
from autopipe import tuning
from autopipe.core import files
from autopipe.core.cluster import Link
from autopipe.core.errors import CheckFailed, FileError, ModelError, RankFailed, UsageError
from autopipe.core.result import MeasuredStage
from autopipe.tuning import Tuned, moved, summary
from autopipe.tuning.candidates import ALONE, COPIES, EQUAL, candidates, equal_layers, neighbours, plan_name
from autopipe.tuning.learning import Seen, learned, predicted_s
from autopipe.tuning.log import FAILED, HUNG, MEMORY, OK, Trial, read_trials, status_of, write_trials
from autopipe.tuning.loop import Tuning, fastest
from tests.synthetic import GIB, chain, cluster

SECONDS = [0.01, 0.01, 0.01, 0.01, 0.03, 0.03]
MODEL = chain(SECONDS, micro_batches=(1, 2), overhead_s=0.001, parameter_bytes=10**6)
TWO = cluster(4, memory_bytes=GIB, link=Link(0.0, 1e7))
"""Its gradients take longer to average than a pipeline to fill."""


def search(**choices):
    fixed = {"global_batch": 8, "devices": 2, "micro_batches": (1, 2), "schedules": ("1F1B", "GPipe")}
    return autopipe.plan(MODEL, TWO, **(fixed | choices))


def every():
    return candidates(search, depths=(1, 2), micro_batches=(1, 2), schedules=("1F1B", "GPipe"))


# candidates


def test_the_first_candidate_is_what_the_search_would_choose():
    found = every()
    assert found[0].plan.predicted.step_s == search().predicted.step_s
    steps = [each.plan.predicted.step_s for each in found]
    assert steps == sorted(steps)


def test_each_shape_is_there_once():
    found = every()
    shapes = {(e.plan.depth, e.plan.micro_batch, e.plan.schedule.name if e.plan.depth > 1 else "") for e in found}
    assert shapes == {(1, 1, ""), (1, 2, ""), *((2, b, s) for b in (1, 2) for s in ("1F1B", "GPipe"))}
    assert len({each.name for each in found}) == len(found)
    assert {(e.why, e.plan.replicas) for e in found if e.plan.depth == 1} == {(ALONE, 1), (COPIES, 2)}
    assert {plan_name(e.plan) for e in found if e.why == COPIES} == {
        f"data parallelism, micro-batch {size}, 2 replicas" for size in (1, 2)
    }


def test_equal_layers_are_equal():
    (found,) = equal_layers(search, MODEL, search())
    assert found.plan.cuts == (3,)
    assert found.why == EQUAL
    assert equal_layers(search, MODEL, search(depths=(1,))) == []


def test_neighbours_move_one_cut_to_the_next_legal_place():
    plan = search(depths=(2,), pins={"layers.2": 0, "layers.3": 1})
    assert plan.cuts == (3,)
    assert sorted(each.plan.cuts for each in neighbours(search, MODEL, plan)) == [(2,), (4,)]
    edge = search(depths=(2,), pins={"layers.1": 1})
    assert [each.plan.cuts for each in neighbours(search, MODEL, edge)] == [(2,)]


def test_replicas_are_named_and_their_neighbours_keep_them():
    plan = search(depths=(2,), replicas=(2,), devices=4)
    assert plan_name(plan).endswith(", 2 replicas")
    assert {each.plan.replicas for each in neighbours(partial(search, devices=4), MODEL, plan)} == {2}


# learning


def seen(plan, forward=1.0, backward=1.0):
    stages = tuple(
        MeasuredStage(
            stage.costs.forward_s * forward + plan.overhead_s, stage.costs.backward_s * backward + plan.overhead_s
        )
        for stage in plan.stages
    )
    return Seen(plan, stages)


def test_a_trial_as_predicted_teaches_nothing():
    again = learned(MODEL, [seen(search())])
    for before, after in zip(MODEL.costs, again.costs, strict=True):
        for a, b in zip(before.layers, after.layers, strict=True):
            assert (b.forward_s, b.backward_s) == pytest.approx((a.forward_s, a.backward_s))


def test_a_slower_machine_is_learned_from_one_trial():
    plan = search()
    taught = learned(MODEL, [seen(plan, 1.3, 1.2)])
    for layer, cost in zip(MODEL.at(1), taught.at(1), strict=True):
        assert cost.forward_s == pytest.approx(1.3 * layer.forward_s)
        assert cost.input_grad_s == pytest.approx(1.2 * layer.input_grad_s)
    shape = {"micro_batches": (1,), "schedules": ("1F1B",), "depths": (2,), "pins": {"layers.0": 0, "layers.1": 1}}
    other = search(**shape)
    slow = chain([1.3 * t for t in SECONDS], overhead_s=0.001, parameter_bytes=10**6)
    evenly = learned(MODEL, [seen(plan, 1.3, 1.3)])
    expected = autopipe.plan(slow, TWO, global_batch=8, replicas=(1,), **shape)
    assert predicted_s(other, MODEL, evenly) == pytest.approx(expected.predicted.step_s)
    assert predicted_s(other, MODEL, MODEL) == pytest.approx(other.predicted.step_s)


def test_one_slow_stage_makes_its_layers_slow_and_no_others():
    plan = search(depths=(2,), pins={"layers.2": 0, "layers.3": 1})
    part = seen(plan)
    slow = replace(part, stages=(part.stages[0], seen(plan, 2.0, 2.0).stages[1]))
    taught = learned(MODEL, [slow]).at(plan.micro_batch)
    ratios = [b.forward_s / a.forward_s for a, b in zip(MODEL.at(plan.micro_batch), taught, strict=True)]
    assert ratios == pytest.approx([1, 1, 1, 2, 2, 2])


def test_a_size_learns_from_its_own_trials_first():
    ones, twos = search(micro_batches=(1,)), search(micro_batches=(2,))
    taught = learned(MODEL, [seen(ones, 2.0, 2.0), seen(twos, 3.0, 3.0)])
    assert taught.at(1)[0].forward_s == pytest.approx(2 * MODEL.at(1)[0].forward_s)
    assert taught.at(2)[0].forward_s == pytest.approx(3 * MODEL.at(2)[0].forward_s)


def test_absurd_times_teach_at_most_five_times():
    assert learned(MODEL, [seen(search(), 1e6, 0.0)]).at(1)[0].forward_s == pytest.approx(5 * MODEL.at(1)[0].forward_s)


# the log


def test_trials_read_back_as_they_were_written(tmp_path):
    trials = [
        Trial(
            "1F1B, 2 stages cut at 3, micro-batch 1", ALONE, OK, 0.1, 0.02, 0.11, 0.12, 3, 4.5, (0.1, 0.2), (0.3, 0.4)
        ),
        Trial("micro-batch 4", "profile", MEMORY, reason='MemoryError: "no", said\nit', plan="plan-002.json"),
    ]
    write_trials(tmp_path / "trials.csv", trials)
    assert read_trials(tmp_path / "trials.csv") == trials
    assert read_trials(tmp_path / "none.csv") == []


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "name,why\nx,y\n", "\x00"])
def test_another_file_is_not_a_list_of_trials(tmp_path, text):
    (tmp_path / "trials.csv").write_text(text + "more")
    if text != "\x00":
        with pytest.raises(FileError, match="is not a list of trials"):
            read_trials(tmp_path / "trials.csv")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelError("model.py, line 9, in loss_fn: MemoryError: no room"), MEMORY),
        (RankFailed("rank 1 failed: OutOfMemoryError: CUDA out of memory. Tried to allocate"), MEMORY),
        (RankFailed("rank 1 hung in 1F3: nothing moved for 15 s; all ranks were ended"), HUNG),
        (RankFailed("rank 0 was killed by SIGKILL; all other ranks were ended"), FAILED),
        (ModelError("model.py: ValueError: unhung in there"), FAILED),
    ],
)
def test_failures_are_told_apart(error, status):
    assert status_of(error) == status


# the loop, with trials that are made up


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A tuning whose trials take what ``steps`` says of a plan, or raise it; and the names that were tried."""
    tried = []

    def start(steps, trials=(), deadline=None):
        def run(plan, source, **options):
            tried.append(plan_name(plan))
            result = steps(plan)
            if isinstance(result, BaseException):
                raise result
            from autopipe.runtime.checking.plans import Tried

            stages = tuple(MeasuredStage(s.costs.forward_s, s.costs.backward_s) for s in plan.stages)
            return Tried(result, 0.01, stages, plan.predicted.peak_bytes)

        monkeypatch.setattr("autopipe.runtime.checking.plans.try_plan", run)
        said = []
        moment = time.monotonic() + 1000 if deadline is None else deadline
        loop = Tuning("model.py", tmp_path, search, MODEL, moment, 15.0, said.append, list(trials))
        loop.queue = every()
        return loop, tried, said

    return start


def test_the_best_comes_first_then_the_baselines_then_the_neighbours(made_up, tmp_path):
    loop, tried, said = made_up(lambda plan: plan.predicted.step_s)
    loop.run()
    assert tried[0] == plan_name(search())
    assert [trial.why for trial in loop.trials[1:3]] == [ALONE, EQUAL]
    assert any(trial.why.startswith("neighbour") for trial in loop.trials)
    assert loop.best.step_s == min(trial.step_s for trial in loop.trials)
    assert len(set(tried)) == len(tried) == len(loop.trials) == len(said)
    assert read_trials(tmp_path / "trials.csv") == loop.trials
    assert all((tmp_path / trial.plan).exists() for trial in loop.trials)


def test_hopeless_plans_are_not_tried(made_up, monkeypatch):
    monkeypatch.setattr("autopipe.tuning.loop.HOPELESS", 1.01)
    loop, _, _ = made_up(lambda plan: plan.predicted.step_s)
    loop.run()
    for trial in loop.trials:
        assert trial.why in (ALONE, EQUAL) or trial.predicted_s < 1.01 * loop.trials[0].step_s
    assert len(loop.trials) < len(every())


def test_failures_are_rows_and_the_search_goes_on(made_up):
    def steps(plan):
        if plan.schedule.name == "GPipe" and plan.depth > 1:
            return RankFailed("rank 1 hung in 1F1: nothing moved for 15 s; all ranks were ended")
        return ModelError("loss_fn: MemoryError: no") if plan.micro_batch == 2 else plan.predicted.step_s

    loop, _, said = made_up(steps)
    loop.run()
    found = {trial.status for trial in loop.trials}
    assert {OK, MEMORY} <= found
    assert loop.best.status == OK
    assert any("no best yet" in line or "out of memory" in line for line in said)


def test_what_was_tried_is_not_repeated(made_up):
    first, tried, _ = made_up(lambda plan: plan.predicted.step_s)
    first.run()
    second, _, _ = made_up(lambda plan: plan.predicted.step_s, trials=first.trials[:2])
    before = len(tried)
    second.run()
    assert not set(tried[before:]) & {trial.name for trial in first.trials[:2]}
    assert {t.name for t in second.trials} == {t.name for t in first.trials}


def test_a_measurement_that_contradicts_the_prediction_wins(made_up):
    favourite = next(each for each in every() if each.plan.depth == 2 and each.plan.schedule.name == "GPipe")
    loop, _, _ = made_up(lambda plan: plan.predicted.step_s * (0.7 if plan_name(plan) == favourite.name else 1.0))
    loop.run()
    assert loop.best.name == favourite.name


def test_without_time_nothing_is_begun(made_up):
    loop, tried, said = made_up(lambda plan: 1.0, deadline=time.monotonic() + 1)
    loop.run()
    assert tried == []
    assert "stopped with" in said[0]


def test_a_trial_that_the_deadline_ends_is_not_a_failure(made_up, monkeypatch):
    monkeypatch.setattr("autopipe.tuning.loop._SHORTEST_S", 0.0)
    moment = time.monotonic() + 2.0
    loop, tried, said = made_up(lambda plan: _late(moment), deadline=moment)
    loop.run()
    assert len(tried) == 1
    assert loop.trials == []
    assert "the time was over during" in said[-1]


def test_a_budget_that_measuring_uses_up_is_told_as_that():
    with (
        pytest.raises(
            CheckFailed, match=r"before the layers and the links were measured. Give more time with --budget"
        ),
        tuning._in_time(time.monotonic() - 1),
    ):
        raise RankFailed("its time was over: all ranks were ended")
    with pytest.raises(ModelError), tuning._in_time(time.monotonic() + 1000):
        raise ModelError("model.py has no build_model")


def _late(moment):
    time.sleep(max(0.0, moment - time.monotonic()))
    return RankFailed("its time was over: all ranks were ended")


# the result


def tuned(trials, tmp_path):
    return Tuned(trials, fastest(trials), search(), tmp_path)


TRIALS = [
    Trial("a", "predicted best", OK, 0.10, predicted_s=0.08, learned_s=0.08),
    Trial("b", ALONE, OK, 0.20, predicted_s=0.16, learned_s=0.19),
    Trial("c", EQUAL, HUNG, reason="rank 1 hung"),
    Trial("d", "neighbour", OK, 0.09, predicted_s=0.08, learned_s=0.091),
]


def test_gains_are_ratios_of_measured_steps(tmp_path):
    assert tuned(TRIALS, tmp_path).gains == {EQUAL: None, ALONE: pytest.approx(0.20 / 0.09), COPIES: None}


def test_copies_of_the_model_are_no_single_device(tmp_path):
    made = [replace(TRIALS[0], why=COPIES), TRIALS[1], replace(TRIALS[2], status=OK, step_s=0.15)]
    text = summary(tuned(made, tmp_path))
    assert "gain      2.00 times as fast as no pipeline" in text
    assert "gain      1.50 times as fast as equal layers" in text
    assert "gain      the best is data parallelism" in text
    assert "data parallelism" not in summary(tuned(TRIALS, tmp_path))


def test_equal_layers_are_tried_where_the_best_has_no_pipeline(made_up):
    loop, _, _ = made_up(lambda plan: plan.predicted.step_s * (0.1 if plan.depth == 1 else 1.0))
    loop.run()
    assert loop.best.why in (ALONE, COPIES)
    assert fastest(loop.trials, EQUAL) is not None


def test_errors_compare_the_profile_with_what_was_learned_before_each_trial(tmp_path):
    before, after = tuned(TRIALS, tmp_path).errors
    assert before == pytest.approx((0.2 + 1 / 9) / 2)
    assert after == pytest.approx((0.05 + 1 / 90) / 2)
    assert tuned(TRIALS[:1], tmp_path).errors is None


def test_the_summary_lists_every_trial(tmp_path):
    text = summary(tuned(TRIALS, tmp_path))
    assert re.search(r"^    3 +hung  c: rank 1 hung$", text, re.MULTILINE)
    assert re.search(r"^    4\* +90.0 ms +91.0 ms  d$", text, re.MULTILINE)
    assert "best      d · 90.0 ms a step · 3 trials, 1 failed" in text
    assert "gain      equal layers did not run" in text
    assert "gain      2.22 times as fast as no pipeline" in text


def test_a_plan_keeps_its_files_when_it_moves(tmp_path):
    (tmp_path / "plan.tune").mkdir()
    plan = replace(search(), model=replace(search().model, path="../model.py"))
    assert moved(plan, tmp_path / "plan.tune", tmp_path).model.path == "model.py"


def test_a_folder_of_another_request_is_refused(tmp_path):
    asked = {"model": "a", "devices": 2}
    assert tuning._opened(tmp_path / "t", asked) == []
    assert tuning._opened(tmp_path / "t", asked) == []
    with pytest.raises(UsageError, match=r"another request \(devices 2, now 3\)"):
        tuning._opened(tmp_path / "t", asked | {"devices": 3})


def test_no_plan_that_runs_is_an_error_with_the_reasons(made_up, tmp_path):
    loop, _, _ = made_up(lambda plan: ModelError("loss_fn: ValueError: no"))
    with pytest.raises(CheckFailed, match=r"no plan ran: .*ValueError: no"):
        tuning._tuned(loop, tmp_path / "plan.json", (1, 2), (1, 2), ("1F1B", "GPipe"))


def test_an_interrupt_keeps_the_best(made_up, tmp_path):
    count = iter(range(10))
    loop, _, _ = made_up(lambda plan: KeyboardInterrupt() if next(count) == 2 else plan.predicted.step_s)
    result = tuning._tuned(loop, tmp_path / "plan.json", (1, 2), (1, 2), ("1F1B", "GPipe"))
    assert result.interrupted
    assert len(result.trials) == 2
    assert files.load(tmp_path / "plan.json").predicted == search().predicted


def test_an_interrupt_before_any_trial_is_one(made_up, tmp_path):
    loop, _, _ = made_up(lambda plan: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tuning._tuned(loop, tmp_path / "plan.json", (1, 2), (1, 2), ("1F1B", "GPipe"))
