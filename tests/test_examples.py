"""The examples: short, deterministic, and by the contract of a model file."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = ["gpt2", "llama", "mlp"]
torch = pytest.importorskip("torch")


def load(name: str):
    """The example's module, by its path as autopipe imports it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loss(example, model, batch_size: int):
    """The loss of one example batch."""
    inputs, target = example.example_batch(batch_size)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return example.loss_fn(output, target)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert f"examples/{path.name}" in text


@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_dimension_0_and_always_the_same(name):
    example = load(name)
    for size in (1, 3):
        first, second = example.example_batch(size), example.example_batch(size)
        leaves = torch.utils._pytree.tree_leaves(first)
        assert all(leaf.shape[0] == size for leaf in leaves if leaf is not None)
        assert all(map(torch.equal, filter(torch.is_tensor, leaves), torch.utils._pytree.tree_leaves(second)))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_trains(name):
    torch.manual_seed(0)
    example = load(name)
    model = example.build_model()
    assert model.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(example, model, 2)
        assert value.dim() == 0
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_small(name):
    assert sum(parameter.numel() for parameter in load(name).build_model().parameters()) < 10_000_000


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A copy of the examples with a cluster of three local processes: profiles and plans are written beside them."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    local = Cluster("local", (Device("cpu", 2**33, 3),), (Tier("local", 3, Link(1e-4, 1e9)),))
    files.write(local, tmp_path / "cluster.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> str:
    """What a command printed; it must succeed."""
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def planned(name: str, ranks: int) -> None:
    """Write plan.json for an example on so many ranks."""
    few = ("--global-batch", "6", "--micro-batch", "2", "--budget", "2", "--depth", str(ranks))
    command("autopipe", "plan", f"examples/{name}.py", "--cluster", "cluster.json", *few)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_of_it_trains_as_one_process(here, name, ranks):
    planned(name, ranks)
    result = json.loads(command("autopipe", "check", "plan.json", "--json"))
    assert result["parity"]["passed"]
    assert result["parity"]["max_gradient_difference"] <= 1e-5
    assert result["parity"]["max_loss_difference"] <= 1e-5
    assert len(result["measured"]["peak_bytes"]) == ranks
    assert "parity passed" in command("autopipe", "show", "plan.json")


@pytest.mark.slow
def test_a_user_s_own_loop_trains_on_the_plan(here):
    planned("gpt2", 2)
    out = command("torch.distributed.run", "--nproc-per-node", "2", "examples/train_with_plan.py", "plan.json")
    losses = [float(value) for value in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
