from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopipe
from autopipe.core import files
from autopipe.core.errors import FileError, ScheduleError, UsageError
from autopipe.core.plan import Plan, Prediction, ScheduleTable
from autopipe.core.schedule import Action
from tests import exports
from tests.samples import ORDER, check_result, plan, profile


def test_a_plan_knows_its_cuts():
    assert plan().cuts == (3,)


def test_the_layers_that_recompute_have_their_numbers_in_the_model():
    made = plan()
    last = made.stages[-1]
    again = replace(made, stages=(*made.stages[:-1], replace(last, recompute=last.layers[-1:])))
    assert (made.recompute, again.recompute) == ((), (last.stop - 1,))


def test_the_schedule_survives_its_text():
    table = plan().schedule
    assert ScheduleTable.of(table.parsed()) == table
    assert table.parsed().order[1][:2] == (Action.parse("1F0"), Action.parse("1B0"))


def test_the_digest_follows_the_content():
    assert plan().digest == plan().digest
    assert replace(plan(), noise=0.5).digest != plan().digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 9}, r"global_batch is 9, but micro_batch × micro_batches × replicas = 8"),
        ({"stages": plan().stages[:1]}, "not those of the schedule's placement"),
        ({"stages": plan().stages[::-1]}, "without gaps"),
        ({"stages": (plan().stages[0], replace(plan().stages[1], rank=0))}, "not those of the schedule's placement"),
        ({"hops": ()}, "2 stages need 1 hops, not 0"),
        ({"depth": 3}, "depth is 3, but the schedule has 2 ranks"),
        ({"memory_limit_bytes": (1,)}, "2 ranks, but a memory limit"),
        ({"predicted": Prediction(1.0, 8.0, 0.0, (1,))}, "2 ranks, but a memory limit or a predicted peak"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        replace(plan(), **change)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("0X0",), "'0X0' is not an action"),
        (("2F0",), "2F0"),
        (ORDER[0][:-1], "stage 0, micro-batch 3 has F: it needs F and B"),
        (ORDER[0][::-1], "0B"),
    ],
)
def test_a_table_that_cannot_run_is_refused(order, message):
    with pytest.raises(ScheduleError, match=message):
        replace(plan(), schedule=replace(plan().schedule, order=(order, ORDER[1])))


def test_a_saved_plan_loads_as_it_was(tmp_path):
    plan().save(tmp_path / "plan.json")
    assert autopipe.load(tmp_path / "plan.json") == plan()


def test_plans_and_check_results_print_as_their_tables():
    assert "within 5.0 % of the bound" in str(plan())
    assert "parity    passed" in str(check_result())


def test_a_check_must_measure_the_ranks_that_were_predicted():
    result = check_result()
    with pytest.raises(UsageError, match="2 ranks were predicted, 1 measured"):
        replace(result, measured=replace(result.measured, peak_bytes=(1,)))


def test_plain_data_needs_no_torch():
    code = (
        "import sys; from tests import samples; samples.check_result(); str(samples.plan()); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
    assert profile().parameters


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda plan: plan.update(replicas=0, global_batch=0), "replicas is 0, it must be 1 or more"),
        (lambda plan: plan.update(micro_batch=-2), "micro_batch is -2"),
        (lambda plan: plan["stages"][0].update(layers=[]), "stage 0 has no layers"),
    ],
)
def test_a_file_with_parts_that_contradict_each_other_is_refused(edit, message):
    content = json.loads(files.to_json(exports.plan_of(exports.llama(6), [3], exports.one_f_one_b(2, 4))))
    edit(content)
    with pytest.raises(FileError, match=message):
        files.from_json(json.dumps(content), Plan)
