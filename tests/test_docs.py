"""The documentation holds what it says: its files load, its numbers add up, its model file works, its links exist."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopipe
from autopipe import export
from autopipe.core import files
from autopipe.core import schedule as _schedules
from autopipe.core.cluster import Cluster
from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from autopipe.core.profile import Profile
from autopipe.core.result import CheckResult
from autopipe.core.schedule import StageTimes, kinds
from autopipe.core.stage_seconds import StageSeconds
from autopipe.core.validation import validate
from autopipe.exploring import explore
from autopipe.report.explored import explored_text
from tests.samples import plan

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KINDS = {files._FORMATS[kind]: kind for kind in (Cluster, Profile, Plan, CheckResult, StageSeconds)}


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language, "" for those that name none; a fence that ends one begins no other."""
    every = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for named, text in every if named == language]


@pytest.fixture(scope="module")
def examples():
    """The worked examples of docs/files.md, by kind."""
    texts = blocks(ROOT / "docs" / "files.md", "json")
    kinds = [KINDS[json.loads(text)["format"]] for text in texts]
    return {kind: files.from_json(text, kind) for kind, text in zip(kinds, texts, strict=True)}


def test_every_format_has_a_worked_example(examples):
    assert set(examples) == set(KINDS.values())


def test_the_plan_is_that_of_the_profile_and_the_cluster(examples):
    plan = examples[Plan]
    again = autopipe.plan(examples[Profile], examples[Cluster], global_batch=2, replicas=[1])
    assert (again.stages, again.schedule, again.hops) == (plan.stages, plan.schedule, plan.hops)
    assert again.predicted == plan.predicted
    assert plan.profile.digest == examples[Profile].digest


def test_the_step_is_the_one_that_the_page_computes(examples):
    assert examples[Plan].predicted.step_s == pytest.approx(0.095)
    assert "10 + 2 + 10 + 20 + 10 + 20 + 2 + 20 + 1 = 95 ms" in (ROOT / "docs" / "files.md").read_text()


def test_the_check_is_one_of_that_plan(examples):
    result = examples[CheckResult]
    assert result.plan_digest == examples[Plan].digest
    assert result.predicted == examples[Plan].predicted
    assert result.error == pytest.approx(result.measured.step_s / result.predicted.step_s - 1)


def test_the_solver_example_holds():
    exec(blocks(ROOT / "docs" / "solvers.md", "python")[0], {})


def test_the_model_file_works():
    torch = pytest.importorskip("torch")
    names: dict[str, object] = {}
    exec(blocks(ROOT / "docs" / "model-file.md", "python")[0], names)
    inputs, target = names["example_batch"](3)
    loss = names["loss_fn"](names["build_model"]()(*inputs), target)
    assert loss.dim() == 0
    assert torch.isfinite(loss)


SCHEDULES = ROOT / "docs" / "schedules.md"


def test_the_explored_schedule_is_printed_as_it_is():
    command, printed, *_ = re.findall(r"^```\n(.*?)^```", SCHEDULES.read_text(), re.MULTILINE | re.DOTALL)
    assert "ZB-V --ranks 4 --stages 8 --micro-batches 8" in command
    seconds = StageSeconds.equal(8, forward_s=0.01, input_grad_s=0.01, weight_grad_s=0.007, transfer_s=0.0005)
    assert explored_text(explore("ZB-V", seconds, ranks=4, micro_batches=8)) == printed.rstrip("\n")


def test_every_schedule_is_on_the_page():
    named = {
        name.strip()
        for row in re.findall(r"^\| ([^|]+) \|", SCHEDULES.read_text(), re.MULTILINE)
        for name in row.split(",")
    }
    assert {kind.name for kind in kinds("torch")} <= named


def test_the_new_schedule_works(monkeypatch):
    monkeypatch.setattr("autopipe.core.schedule._KINDS", dict(_schedules._KINDS))
    monkeypatch.setattr("autopipe.core.schedule._ALIASES", dict(_schedules._ALIASES))
    exec(blocks(SCHEDULES, "python")[0], {})
    table = _schedules.kind("OneByOne").schedule(2, 3, times=[StageTimes(1, 2, 1, 1)] * 2)
    validate(table)
    assert str(table.order[1][2]) == "1F1"


def test_the_new_exporter_works(monkeypatch):
    monkeypatch.setattr(sys.modules["autopipe.export.trainer"], "_TRAINERS", {})
    exec(next(text for text in blocks(ROOT / "docs" / "export.md", "python") if "@exporter(" in text), {})
    made = export.trainer("sizes").files(plan(), ("a heading",))
    assert made == {"sizes.txt": "# a heading\n3 3\n"}
    with pytest.raises(CannotExport, match="one stage a rank, the plan 2"):
        export.trainer("sizes").make(replace(plan(), stages_per_rank=2), ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
