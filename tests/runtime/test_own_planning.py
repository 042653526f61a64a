"""``autopipe plan --allow-stale`` and ``autopipe check`` as from the shell: profiled, planned, run on real ranks.

Over links that take no time a period is never longer than a step that flushes, whatever was measured.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from autopipe import cli
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.plan import Plan
from autopipe.core.result import CheckResult
from autopipe.core.schedule import kind


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autopipe", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.mark.slow
def test_a_stale_plan_is_chosen_and_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(Path(__file__).with_name("small_mlp.py"), tmp_path / "model.py")
    monkeypatch.chdir(tmp_path)
    files.write(Cluster("test", (Device("cpu", 4 << 30, 2),), (Tier("local", 2, Link(1e-9, 1e12)),)), "cluster.json")
    size = ("--depth", "2", "--global-batch", "8", "--micro-batch", "2", "--budget", "0")
    assert run(monkeypatch, "plan", "model.py", "--cluster", "cluster.json", *size, "--allow-stale") == 0
    plan = files.read("plan.json", Plan)
    assert kind(plan.schedule.name).asynchronous
    assert "updates old when a forward meets them" in " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, "check", "plan.json", "--timeout", "300") == 0
    result = files.read("plan.check.json", CheckResult)
    assert result.parity.passed
    assert len(result.staleness) == 2
    assert "stage 0 staleness" in capsys.readouterr().out
