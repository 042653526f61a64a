"""The solvers reach what the authors of other planners published, on their inputs; the figures are theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "peers"


def planners(*args: str, code: int = 0) -> Any:
    command = [sys.executable, str(ROOT / "benchmarks" / "planners.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if "--json" in args else done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "args", "published"),
    [
        ("alexnet", "--devices 4 --bandwidth 1e9 --max-replicas 1", 0.0664535),
        ("alexnet", "--devices 16 --bandwidth 10e9", 0.00571266),
        ("alexnet", "--levels 4,4 --bandwidths 10e9,1e9", 0.0188744),
        ("gnmt", "--devices 16 --bandwidth 1e9", 0.019285),
    ],
)
def test_pipedream(name: str, args: str, published: float) -> None:
    found = planners("--peer", "pipedream", "--input", str(DATA / f"{name}.txt"), *args.split(), "--json")
    assert found["objective"] == pytest.approx(published, rel=5e-6)
    assert found["proved"]
    assert found["lower_bound"] == found["objective"]


def test_pipedream_uses_no_more_devices_than_help() -> None:
    args = ("--peer", "pipedream", "--input", str(DATA / "gnmt.txt"), "--devices", "16", "--bandwidth", "1e9")
    assert sum(stage["replicas"] for stage in planners(*args, "--json")["split"]) == 7
    assert "objective 0.019285 · proved" in planners(*args)


def test_pipedream_one_level_is_no_levels() -> None:
    args = ("--peer", "pipedream", "--input", str(DATA / "gnmt.txt"), "--json")
    flat = planners(*args, "--devices", "8", "--bandwidth", "3e9")
    level = planners(*args, "--levels", "8", "--bandwidths", "3e9")
    assert level["objective"] == flat["objective"]


@pytest.mark.parametrize(("name", "published"), [("bert24_inference", 17.7899), ("bert24_training", 41.7458)])
def test_dnn_partitioning(name: str, published: float) -> None:
    args = ("--peer", "dnn-partitioning", "--input", str(DATA / f"{name}.json"), "--devices", "6", "--json")
    found, linear = planners(*args), planners(*args, "--order", "linear")
    assert found["objective"] == pytest.approx(published, rel=5e-6)
    assert found["proved"]
    assert linear["objective"] >= found["objective"]
    assert linear["lower_bound"] <= found["objective"]
    nodes = sorted(int(node) for stage in found["split"] for group in stage["nodes"] for node in group.split())
    content = json.loads((DATA / f"{name}.json").read_text())
    assert nodes == sorted(node["id"] for node in content["nodes"])


def way(seconds: float, a: float, b: float, before: dict[str, float], after: dict[str, float]) -> dict[str, object]:
    return {
        "id": str(seconds), "timePerSample": seconds, "parameterSize": 0.0, "memoryUsageA": a, "memoryUsageB": b,
        "syncTimeFw": before, "syncTimeBw": after,
    }  # fmt: skip


def test_piper_by_hand(tmp_path: Path) -> None:
    """Four equal nodes of 1 s on two devices, free transfers: two and two. A node holds 10 y, or nothing at 1.5 s.

    With 40 bytes all is kept: the first stage has y = 2. With 30 one node of the first stage must recompute: 2.5 s;
    a third node on the last stage would take 3 s.
    """
    nodes = [
        {
            "id": i,
            "TMPCs": {
                "1": [
                    way(s, a, 0.0, {str(i - 1): 0.0} if i else {}, {str(i + 1): 0.0} if i < 3 else {})
                    for s, a in ((1.0, 10.0), (1.5, 0.0))
                ]
            },
        }
        for i in range(4)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "communicationCost": 0.0} for i in range(3)]
    cluster = {"maxDevices": 2, "maxMemoryPerDevice": 40.0, "bandwidth": 1.0, "mbsInBatch": 2}
    path = tmp_path / "four.json"
    path.write_text(json.dumps({**cluster, "nodes": nodes, "edges": edges}))
    args = ("--peer", "piper", "--input", str(path), "--max-replicas", "1", "--json")
    assert planners(*args)["objective"] == 2.0
    tight = planners(*args, "--memory", "30")
    assert (tight["objective"], tight["proved"]) == (2.5, True)
    assert [len(stage["nodes"]) for stage in tight["split"]] == [2, 2]


def test_wrong_use_is_said(tmp_path: Path) -> None:
    assert "--bandwidth" in planners("--peer", "pipedream", "--input", str(DATA / "gnmt.txt"), "--devices", "2", code=2)
    broken = tmp_path / "broken.txt"
    broken.write_text("node1 -- Input0\n")
    args = ("--peer", "pipedream", "--input", str(broken), "--devices", "2", "--bandwidth", "1e9")
    assert "line 1: neither a node nor an edge" in planners(*args, code=1)
