"""Every torchrun command in the documentation runs as it stands there, but for the host and the port."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster
from autopipe.core.result import CheckResult
from tests.test_docs import ROOT, blocks

ELSEWHERE = re.compile(r"torchtitan|…")
"""Commands of trainers that are not installed here, or that are not written out."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def lines(page: str) -> list[str]:
    """The lines of a page that call torchrun."""
    found = [line for block in blocks(ROOT / page, "") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in found if re.match(r"(\w+=\S+ )*torchrun ", line) and not ELSEWHERE.search(line)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a line in a folder that holds what the pages name, with this interpreter's programs on the path."""
    for name in ("examples", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.json", "__pycache__"))
    paths = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PET_MASTER_PORT": free_port(),  # torchrun's own, where a command names none
    }

    def start(line: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            ["bash", "-c", line], cwd=tmp_path, env=os.environ | paths, stdin=subprocess.DEVNULL, text=True, **pipes
        )

    return start


def done(*started: subprocess.Popen[str]) -> list[str]:
    """What they print; they must end well."""
    told = [each.communicate(timeout=400) for each in started]
    assert [each.returncode for each in started] == [0] * len(started), told
    return [out for out, _ in told]


PLAN = "autopipe plan examples/gpt2.py --devices 2 --global-batch 4 --micro-batch 1,2 --depth 2 --budget 3 -o plan.json"


def test_two_hosts_measure_and_check_as_the_page_says(shell, tmp_path):
    """Each command on two agents at once, as on two hosts that reach each other."""
    measure, check = lines("docs/concepts.md")
    done(shell(PLAN))
    for line in (measure, check):
        here = line.replace("HOST:29500", f"localhost:{free_port()}")
        assert here != line
        outs = done(shell(here), shell(here))
        assert sorted(map(bool, outs)) == [False, True]  # rank 0 alone prints
    assert len(files.read(tmp_path / "cluster.json", Cluster)) == 2
    assert files.read(tmp_path / "plan.check.json", CheckResult).parity.passed


def test_the_exported_script_runs_as_the_page_says(shell):
    check, train = lines("docs/export.md")
    done(shell(PLAN))
    done(shell("autopipe export plan.json --to torch -o out"))
    assert "check passed" in done(shell(check))[0]
    assert len(re.findall(r"loss (\S+)", done(shell(train))[0])) == 100


def test_the_example_runs_as_it_says(shell):
    done(shell(PLAN))
    text = (ROOT / "examples" / "train_with_plan.py").read_text()
    (line,) = re.findall(r"^torchrun .*", text, re.MULTILINE)
    (out,) = done(shell(line))
    assert "loss" in out


def test_every_torchrun_command_is_run():
    pages = {
        str(page.relative_to(ROOT))
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        if lines(str(page.relative_to(ROOT)))
    }
    assert pages == {"docs/concepts.md", "docs/export.md"}
