"""The shipped profiles and clusters: readable, and planned from without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopipe
from autopipe.core.cluster import Cluster
from autopipe.core.errors import NoPlanFits
from autopipe.core.files import read
from autopipe.core.profile import Profile

PROFILES = Path(__file__).parents[1] / "profiles"


CLUSTERS = sorted(PROFILES.glob("*.cluster.json"))
SHIPPED = sorted(PROFILES.glob("*.profile.json"))


def plan_or_numbers(profile: Profile, cluster: Cluster, devices: int) -> None:
    """Plan; where nothing fits the message has what is needed and what there is."""
    size = profile.micro_batches[0]
    plan, said = None, ""
    try:
        plan = autopipe.plan(profile, cluster, global_batch=8 * size, devices=min(devices, len(cluster)))
    except NoPlanFits as error:
        said = str(error)
    if plan is None:
        assert re.search(r"the smallest needs [\d.]+ \wiB on rank \d+, the limit is [\d.]+ \wiB", said)
        return
    assert plan.gap >= 0
    assert plan.stages[-1].stop == len(profile.layers)
    assert any("analytic" in note for note in plan.notes) == bool(profile.band)


def test_there_are_profiles_and_clusters_of_the_usual_kinds() -> None:
    assert len(CLUSTERS) >= 7
    models = {path.name.split(".")[0] for path in SHIPPED}
    assert {"gpt2-xl", "llama-70b", "bert-large", "vit-large", "mixtral-8x7b", "vgg16", "gnmt"} <= models
    assert sum(path.stat().st_size for path in (*CLUSTERS, *SHIPPED)) < 6e6


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_a_declared_cluster_names_its_sources(path: Path) -> None:
    cluster = read(path, Cluster)
    assert cluster.origin == "measured" or all(
        any(word in " ".join(cluster.sources) for word in words)
        for words in (("data sheet", "white paper"), ("latency",))
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_profile_that_was_not_measured_here_says_so(path: Path) -> None:
    profile = read(path, Profile)
    assert profile.origin in ("measured", "analytic", "imported")
    assert (profile.band > 0) == (profile.origin == "analytic")
    assert profile.sources or profile.origin == "measured"


MANY_LAYERS = ("inception_v3.", "resnet50.")
"""Hundreds of layers that all differ, and too little memory for most splits: over ten seconds."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p.name.startswith(MANY_LAYERS) else ()) for p in SHIPPED],
    ids=lambda path: path.name,
)
def test_every_profile_plans_on_a_cluster_of_its_device(path: Path) -> None:
    profile = read(path, Profile)
    clusters = [read(other, Cluster) for other in CLUSTERS]
    fitting = [c for c in clusters if profile.device == c.devices[0].name] or clusters[:1]
    plan_or_numbers(profile, fitting[0], 4)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda path: path.name)
def test_every_profile_plans_on_every_cluster(cluster: Path) -> None:
    for path in SHIPPED:
        plan_or_numbers(read(path, Profile), read(cluster, Cluster), 16)


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
