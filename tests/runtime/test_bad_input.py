"""Every mistake at the command line: one clear line that names the thing and the fix, and the right exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest

from autopipe import cli
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier

GOOD = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def example_batch(batch_size):
    return (torch.ones(batch_size, 8),), torch.zeros(batch_size, 8)

def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


def without(name: str) -> str:
    """The good model file with one function renamed away."""
    return GOOD.replace(f"def {name}(", f"def _{name}(")


def returning(name: str, value: str) -> str:
    """The good model file with one function's result replaced."""
    return re.sub(rf"(def {name}\(.*\):\n    return ).*", lambda found: found.group(1) + value, GOOD)


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run the command in an empty folder; afterwards none of the processes that it started may be left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPIPE_TEST_MARK", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["autopipe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not left_over(tmp_path)
        return Done(int(end.value.code or 0), *capfd.readouterr())

    return run


def left_over(mark: Path) -> list[str]:
    """Processes that still carry the test's mark in their environment, or were forked for it.

    The interpreter's own helpers may stay, one that tracks and one that forks: they end with it.
    """
    forkserver = _forkserver._forkserver_pid
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, command = (process / "environ").read_bytes(), (process / "cmdline").read_text()
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        marked = f"AUTOPIPE_TEST_MARK={mark}\0".encode() in environment
        helper = int(process.name) == forkserver or "resource_tracker" in command
        if (marked or parent == forkserver) and not helper:
            found.append(command.replace("\0", " "))
    return found


def refused(done: Done, code: int, *said: str) -> None:
    """The command ended with this code and one line that says all of this."""
    line = ["", *done.err.splitlines()][-1]
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert line.startswith("autopipe: error: "), done.err
    for part in said:
        assert re.search(part, line), f"{part!r} is not in {line!r}"


MODELS = {
    "syntax error": ("def build_model(:\n", [r"model\.py, line 1", "syntax"]),
    "raises at import": ("import torch\n1 / 0\n", [r"model\.py, line 2", "ZeroDivisionError"]),
    "imports what is not there": ("import no_such_module\n", [r"model\.py", "No module named 'no_such_module'"]),
    "no build_model": (without("build_model"), [r"model\.py", r"build_model\(\)"]),
    "no example_batch": (without("example_batch"), [r"model\.py", r"example_batch\(\)"]),
    "no loss_fn": (without("loss_fn"), [r"model\.py", r"loss_fn\(\)"]),
    "build_model raises": (returning("build_model", "1 / 0"), [r"model\.py, line 6", "build_model", "ZeroDivision"]),
    "build_model exits": (returning("build_model", "exit(0)"), [r"model\.py, line 6", "build_model", "SystemExit"]),
    "no module": (returning("build_model", "{}"), ["build_model", "dict", "nn.Module"]),
    "forward raises": (
        returning("build_model", "nn.Linear(9, 9)"),
        [r"model\.py", "forward", r"mat1 and mat2 shapes cannot be multiplied"],
    ),
    "no trainable parameter": (
        returning("build_model", "nn.Linear(8, 8).requires_grad_(False)"),
        [r"model\.py", "requires a gradient"],
    ),
    "no parameter": (returning("build_model", "nn.ReLU()"), [r"model\.py", "requires a gradient"]),
    "batch is no pair": (
        returning("example_batch", "torch.ones(batch_size, 8)"),
        ["example_batch", r"\(inputs, target\)", "Tensor"],
    ),
    "inputs are no tuple": (
        returning("example_batch", "(torch.ones(batch_size, 8), None)"),
        ["example_batch", "tuple or a dict", "Tensor"],
    ),
    "wrong batch dimension": (
        returning("example_batch", "((torch.ones(8, batch_size),), torch.zeros(batch_size, 8))"),
        ["example_batch", r"\(8, \d+\)", "dimension 0"],
    ),
    "target without the batch": (
        returning("example_batch", "((torch.ones(batch_size, 8),), torch.zeros(8))"),
        ["example_batch", "target", "dimension 0"],
    ),
    "example_batch raises": (
        returning("example_batch", "[][1]"),
        [r"model\.py, line 9", "example_batch", "IndexError"],
    ),
    "loss is no scalar": (returning("loss_fn", "output - target"), ["loss_fn", r"\(\d+, 8\)"]),
    "loss is no tensor": (returning("loss_fn", "1.0"), ["loss_fn", "float"]),
    "loss is NaN": (returning("loss_fn", "(output * float('nan')).mean()"), [r"model\.py", "loss", "nan"]),
    "loss_fn raises": (returning("loss_fn", "output.nothing"), [r"model\.py, line 12", "loss_fn", "AttributeError"]),
    "loss without a gradient": (returning("loss_fn", "output.detach().mean()"), [r"model\.py", "gradient"]),
}


@pytest.fixture
def in_this_process(monkeypatch):
    """First contact with a model without a process of its own, which takes seconds."""
    monkeypatch.setattr("autopipe.runtime.ranks.launch.apart", lambda function, args, **options: function(*args))


@pytest.mark.parametrize("case", MODELS)
def test_a_model_file_that_fails_is_named_with_its_line(run, tmp_path, in_this_process, case):
    text, said = MODELS[case]
    (tmp_path / "model.py").write_text(text)
    refused(run("profile", "model.py", "--micro-batch", "2"), 2, *said)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["model.py"]


DEATHS = {
    "raises": ("build_model", "1 / 0", [r"model\.py, line 6", "build_model", "ZeroDivisionError"]),
    "ends": ("build_model", "__import__('os')._exit(3)", [r"ended with os\._exit\(3\)", r"model\.py, line 6"]),
    "ends well": ("example_batch", "__import__('os')._exit(0)", [r"os\._exit\(0\)", r"model\.py, line 9"]),
    "ends inside": ("loss_fn", "__import__('ctypes').CDLL(None)._exit(5)", ["exit code 5 while capturing", "library"]),
    "crashes": ("loss_fn", "__import__('ctypes').string_at(0)", ["killed by SIGSEGV", "capturing", "FAULTHANDLER"]),
    "is killed": ("loss_fn", "__import__('os').kill(__import__('os').getpid(), 9)", ["killed by SIGKILL", "memory"]),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("raises", "ends well", "crashes") else pytest.mark.slow)
        for case in DEATHS
    ],
)
def test_a_model_that_ends_its_process_is_told(run, tmp_path, case):
    function, value, said = DEATHS[case]
    (tmp_path / "model.py").write_text(returning(function, value))
    refused(run("profile", "model.py", "--micro-batch", "2"), 2, *said)


@pytest.mark.parametrize("verb", [["profile"], ["plan", "--devices", "2", "--global-batch", "4"]])
@pytest.mark.parametrize("name", ["none.py", "none.py:build", ".", "data.txt"])
def test_a_model_file_that_is_none_is_named(run, tmp_path, verb, name):
    (tmp_path / "data.txt").write_text("words")
    refused(run(*verb[:1], name, *verb[1:]), 2, re.escape(name.partition(":")[0]))


def test_a_builder_that_is_not_there_is_named(run, tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    refused(run("profile", "model.py:build_large"), 2, r"model\.py", "build_large")


def test_an_unknown_optimizer_is_refused(run, tmp_path):
    (tmp_path / "model.py").write_text(GOOD)
    refused(run("profile", "model.py", "--optimizer", "lion"), 2, "lion", "adamw")


PLAN = ("plan", "model.py", "--cluster", "cluster.json", "--global-batch", "4", "--micro-batch", "2", "--budget", "1")


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A folder with the good model, its profile, and a plan of it for two ranks."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "model.py").write_text(GOOD)
    link = Link(1e-4, 1e9)
    files.write(Cluster("two", (Device("cpu", 2**32, 2),), (Tier("local", 2, link),)), folder / "cluster.json")
    command = [sys.executable, "-m", "autopipe", *PLAN, "--depth", "2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def here(planned, tmp_path) -> Path:
    """A fresh copy of that folder, where the command runs."""
    for path in planned.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_the_good_plan_passes(run, here):
    done = run("check", "plan.json", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["parity"]["passed"]
    assert (here / "plan.check.json").exists()


def test_depth_above_the_layers_is_refused(run, here):
    refused(run(*PLAN, "--depth", "9"), 2, "depth 9|--depth", "4 layers")


def test_a_batch_that_no_micro_batch_divides_is_refused(run, here):
    refused(run(*PLAN[:4], "--global-batch", "5", "--micro-batch", "2"), 2, "5", "--micro-batch 2")


def test_a_memory_limit_below_all_plans_is_exit_1(run, here):
    refused(run(*PLAN, "--memory", "1KiB"), 1, "no plan fits", r"\d B|KiB.*", "Try --|more memory")


@pytest.mark.parametrize("option", [["--schedule", "Fancy"], ["--pin", "nothing=0"], ["--pin", "0=7"]])
def test_choices_that_do_not_exist_are_named(run, here, option):
    refused(run(*PLAN, *option), 2, option[1].partition("=")[0])


def edit(path: Path, change) -> None:
    """Rewrite a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


PLANS = {
    "retyped": (lambda c: c.update(micro_batch="2"), [r"plan\.json", "micro_batch"]),
    "unknown field": (lambda c: c.update(micro_bacth=2), [r"plan\.json", "unknown field 'micro_bacth'"]),
    "missing field": (lambda c: c.pop("stages"), [r"plan\.json", "stages"]),
    "future version": (lambda c: c.update(version=99), [r"plan\.json", "version 99"]),
    "other format": (lambda c: c.update(format="autopipe.profile"), [r"plan\.json", "autopipe.profile"]),
    "negative time": (lambda c: c["predicted"].update(step_s=-1.0), [r"plan\.json", r"\$\.predicted\.step_s"]),
    "not whole": (lambda c: c["schedule"]["order"][0].pop(), ["rank|stage|schedule|0[FB]"]),
    "out of order": (lambda c: c["schedule"]["order"][0].reverse(), ["rank|stage|schedule|0[FB]"]),
    "no action": (lambda c: c["schedule"]["order"][0].insert(0, "0Z0"), ["'0Z0' is not an action"]),
    "other layers": (lambda c: c["stages"][0]["layers"].__setitem__(0, "other"), ["other", "[Pp]lan it again"]),
    "model is gone": (lambda c: c["model"].update(path="gone.py"), [r"gone\.py"]),
    "model is not named": (lambda c: c["model"].update(path=None), ["--model FILE"]),
    "no such builder": (lambda c: c["model"].update(builder="build_it"), ["build_it"]),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_run_is_named(run, here, case):
    change, said = PLANS[case]
    edit(here / "plan.json", change)
    refused(run("check", "plan.json"), 2, *said)
    assert not (here / "plan.check.json").exists()


def test_a_truncated_plan_is_named(run, here):
    (here / "plan.json").write_text((here / "plan.json").read_text()[:-100])
    refused(run("check", "plan.json"), 2, r"plan\.json is not whole JSON")


def test_a_changed_model_is_told_before_it_is_imported(run, here):
    (here / "model.py").write_text(f"open('imported', 'w')\n{GOOD}")
    refused(run("check", "plan.json"), 2, r"model\.py has changed", "plan again")
    assert not (here / "imported").exists()


def test_another_model_is_told(run, here):
    (here / "other.py").write_text(GOOD.replace("range(4)", "range(5)"))
    refused(run("check", "plan.json", "--model", "other.py"), 2, r"other\.py", "5 layers", "[Pp]lan it again")


def test_a_plan_for_more_ranks_than_stages_is_refused(run, here):
    edit(here / "plan.json", lambda content: content.update(depth=3))
    refused(run("check", "plan.json"), 2, "depth", "3")


def test_a_model_that_raises_only_on_a_rank_is_named_by_check(run, here):
    raising = GOOD.replace(
        "def build_model():\n", "def build_model():\n    import os; os.environ.get('RANK') != '1' or 1 / 0\n"
    )
    (here / "raising.py").write_text(raising)
    done = run("check", "plan.json", "--model", "raising.py")
    assert done.code in (1, 2)
    assert "ZeroDivisionError" in done.err
    assert "Traceback" not in done.err
