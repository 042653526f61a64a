"""``autopipe plan`` and ``check`` on a file of every model of the zoo, with 2 and 3 processes: parity or a refusal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopipe import cli
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.result import CheckResult
from tests.models import ZOO
from tests.runtime.planned import zoo_file


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a command as from the shell; its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["autopipe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0)

    return run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(ZOO))
def test_a_model_is_planned_and_checked(run, tmp_path: Path, capfd, name: str) -> None:
    case = ZOO[name]
    zoo_file(tmp_path, name)
    for depth in (2, 3):  # in one folder: on two cores the second plan finds the first one's profile
        cluster = Cluster("test", (Device("cpu", 4 << 30, depth),), (Tier("local", depth, Link(1e-4, 1e9)),))
        files.write(cluster, "cluster.json")
        size = ("--micro-batch", "4" if case.fixed else "2", "--global-batch", "8", "--budget", "0")
        code = run("plan", f"{name}.py", "--cluster", "cluster.json", "--depth", str(depth), *size)
        said = capfd.readouterr().err.splitlines()
        if case.refused or case.unplanned:
            assert code == 2
            assert (case.refused or case.unplanned) in said[-1]
            return
        assert code == 0, said
        assert files.load("plan.json").depth == depth
        code = run("check", "plan.json", "--timeout", "300")
        parity = files.read("plan.check.json", CheckResult).parity
        assert code == 0, parity
        assert parity.passed
