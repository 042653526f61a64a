"""The Python of the README runs as it stands there, and a plan made in Python trains under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from tests.runtime.test_bad_input import GOOD

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
FIRST, IN_A_SCRIPT = (next(text for text in SNIPPETS if sign in text) for sign in ("autopipe.profile(", ".build("))
SCRIPT = f"""
import autopipe, torch
from model import build_model, example_batch, loss_fn
model, (inputs, target) = build_model(), example_batch(16)
{IN_A_SCRIPT}
print(f"loss {{loss.item()}}\\n", end="")  # one write, which that of another rank does not part
"""


def run(folder: Path, *command: str) -> str:
    """What the command prints; it must end well."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readme_s_python_runs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(GOOD)
    files.write(
        Cluster("two", (Device("cpu", 2**32, 2),), (Tier("local", 2, Link(1e-4, 1e9)),)), tmp_path / "cluster.json"
    )
    (tmp_path / "first.py").write_text(FIRST)
    assert "parity    passed" in run(tmp_path, sys.executable, "first.py")
    plan = files.load(tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ranks = plan.depth * plan.replicas
    losses = run(tmp_path, *torchrun, str(ranks), "script.py").split()[1::2]
    assert len(losses) == ranks
    assert len(set(losses)) == 1
