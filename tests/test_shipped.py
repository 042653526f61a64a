"""The shipped profiles and clusters: readable, and planned from without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import autopipe
from autopipe.core.cluster import Cluster
from autopipe.core.files import read
from autopipe.core.profile import Profile

PROFILES = Path(__file__).parents[1] / "profiles"


def test_every_shipped_profile_plans_on_every_shipped_cluster() -> None:
    profiles = [read(path, Profile) for path in PROFILES.glob("*.profile.json")]
    clusters = [read(path, Cluster) for path in PROFILES.glob("*.cluster.json")]
    assert profiles
    assert clusters
    for profile in profiles:
        for cluster in clusters:
            plan = autopipe.plan(profile, cluster, global_batch=64)
            assert plan.gap >= 0
            assert plan.stages[-1].stop == len(profile.layers)


def test_planning_from_the_shipped_files_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from autopipe.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    command = ["plan", "gpt2-small.cpu.profile.json", "--cluster", "cpu-2.cluster.json", "--global-batch", "64"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "-o", str(tmp_path / "plan.json")],
        cwd=PROFILES, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
