"""The commands of docs/export.md that call autopipe; those that start trainers are run by tests of their own."""

from __future__ import annotations

import shlex
import sys

import pytest

from autopipe import cli
from autopipe.core import files
from autopipe.core.schedule import kind
from tests.exports import LINK, llama, plan_of
from tests.synthetic import cluster
from tests.test_docs import ROOT
from tests.test_docs_commands import commands

LINES = [shlex.join(line) for line in commands("export.md")]
EXPORTS = [line for line in LINES if line.startswith("autopipe export")]
BACK = [line for line in LINES if "--from" in line]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a line in a folder with what the page names; what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> str:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert not end.value.code, err
        return out

    return run


@pytest.mark.parametrize("line", EXPORTS)
def test_a_plan_is_exported(line, run, tmp_path):
    files.write(
        plan_of(llama(6), (4,), kind("1F1B").schedule(2, 4), recompute=[f"model.layers.{n}" for n in range(6)]),
        "plan.json",
    )
    run(line)
    assert [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("line", BACK)
def test_a_split_comes_back(line, run, tmp_path):
    """A profile in the model's place, as the page says, of a model with as many blocks as the line has."""
    split = line.partition("--from")[2]
    blocks = split.count("t") - split.count("megatron") if "megatron" in split else 6
    blocks = sum(map(int, split.rpartition(":")[2].split(","))) if "counts" in split else blocks
    files.write(llama(blocks), "model.profile.json")
    files.write(cluster(4, link=LINK), "cluster.json")
    files.write(plan_of(llama(6), (4,), kind("1F1B").schedule(2, 4)), "plan.json")
    run("autopipe export plan.json --to torchtitan -o out")
    (tmp_path / "out" / "autopipe_torchtitan.py").rename("config.py")
    out = run(line.replace(" model.py ", " model.profile.json --cluster cluster.json "))
    assert "yours" in out


def test_no_line_is_left_out():
    assert len(EXPORTS) + len(BACK) == len(LINES) == (ROOT / "docs" / "export.md").read_text().count("\nautopipe ")
