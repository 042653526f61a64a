"""The command line without a model: usage, exit codes, what goes to stdout and stderr, and what is never imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from autopipe import cli
from autopipe.core import files
from autopipe.core.cluster import Cluster, Device, Link, Tier
from autopipe.core.errors import CheckFailed, FileError, NoPlanFits
from autopipe.core.result import Rehearsal
from autopipe.explain import explanation
from autopipe.report import html, terminal
from autopipe.report.trace import trace_json
from autopipe.simulate import simulate_plan
from tests.samples import check_result, cluster, plan, profile, rehearsal


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["autopipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        code = end.value.code
        return (0 if code is None else code, *capsys.readouterr())

    return run


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder with a plan, its check, a profile and a cluster; the working directory."""
    monkeypatch.chdir(tmp_path)
    plan().save("plan.json")
    files.write(check_result(), "plan.check.json")
    files.write(profile(), "gpt2.profile.json")
    files.write(cluster(), "cluster.json")
    return tmp_path


PLAN = ("plan", "gpt2.profile.json", "--cluster", "cluster.json", "--global-batch", 8)


def test_help_names_every_verb(run):
    code, out, _ = run("--help")
    assert code == 0
    assert re.findall(r"^  (\w+)  ", out, re.MULTILINE) == [
        "profile", "plan", "check", "tune", "show", "schedule", "export", "cluster",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["profile", "plan", "check", "tune", "show", "schedule", "export", "cluster"])
def test_every_verb_has_help(run, verb):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert f"Usage: autopipe {verb}" in out
    assert "--debug" in out
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["plan"],
        ["plan", "model.py"],
        ["plan", "model.py", "--global-batch", "many"],
        ["plan", "model.py", "--global-batch", "8", "--recompute", "some"],
        ["plan", "model.py", "--global-batch", "8", "--paln"],
        ["plan", "model.py", "--global-batch", "0"],
        ["profile", "model.py", "--devices", "0"],
        ["profile", "model.py", "--threads", "0"],
        ["profile", "model.py", "--budget", "-1"],
        ["check", "plan.json", "--timeout", "-1"],
        ["cluster", "--devices", "0"],
        ["show"],
    ],
)
def test_wrong_usage_is_exit_2_and_one_line(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"autopipe: error: [^\n]+: see autopipe( \w+)? --help\n", err)


def test_wrong_usage_names_the_argument(run):
    assert "no such option: --paln" in run("plan", "model.py", "--global-batch", "8", "--paln")[2]
    assert "missing option '--global-batch'" in run("plan", "model.py")[2]
    assert "no such command 'fly'" in run("fly")[2]


def test_the_bare_command_is_its_help(run):
    assert run() == run("--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch", "1,x"], "--micro-batch '1,x' is not a list of numbers"),
        (["--micro-batch", ""], "--micro-batch '' is not a list of numbers"),
        (["--micro-batch", "3"], "--global-batch 8 is no multiple of --micro-batch 3"),
        (["--depth", "two"], "--depth 'two' is not a list of numbers"),
        (["--memory", "8"], "'8' is not a size: write a number and a unit such as 8GiB"),
        (["--pin", "wte"], "--pin 'wte' is not LAYER=STAGE"),
        (["--devices", "3"], "3 devices wanted, cluster 'local' has 2: use --devices 1…2"),
        (["--micro-batch", "0"], "--micro-batch '0' is not a list of numbers from 1"),
        (["-o", "nowhere/plan.json"], "nowhere/plan.json cannot be written: folder nowhere does not exist"),
    ],
)
def test_arguments_that_cannot_be_meant_are_one_line(run, made, arguments, message):
    code, out, err = run(*PLAN, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("autopipe: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "none.json"], "none.json does not exist"),
        (["check", "none.json"], "none.json does not exist"),
        (["show", "gpt2.profile.json"], "has format 'autopipe.profile', 'autopipe.plan' is needed"),
        (["plan", "plan.json", "--devices", "2", "--global-batch", "8"], "plan.json is no model file (.py)"),
        (["plan", "gpt2.profile.json", "--devices", "2", "--global-batch", "8"], "add --cluster FILE"),
        (["plan", "gpt2.profile.json", "--global-batch", "8"], "Add --devices N, or --cluster FILE"),
        (["profile", "gpt2.profile.json"], "is a profile already"),
        (["cluster", "-o", "nowhere/c.json"], "folder nowhere does not exist"),
    ],
)
def test_files_that_do_not_fit_are_one_line(run, made, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_show_prints_plan_schedule_and_check(run, made):
    code, out, err = run("show", "plan.json")
    assert (code, err) == (0, "")
    assert terminal.plan_text(plan(), measured=check_result(), folder=Path()) in out
    assert terminal.schedule_text(plan().schedule.parsed()) in out
    assert terminal.check_text(check_result(), plan=plan()) in out


def test_show_as_json_is_plan_and_check(run, made):
    code, out, err = run("show", "plan.json", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "plan": json.loads((made / "plan.json").read_text()),
        "check": json.loads((made / "plan.check.json").read_text()),
    }
    (made / "plan.check.json").unlink()
    assert json.loads(run("show", "plan.json", "--json")[1])["check"] is None


def test_a_rehearsal_is_printed_and_kept(run, made, monkeypatch):
    monkeypatch.setattr("autopipe.runtime.checking.rehearsal.rehearse", lambda plan, **options: rehearsal())
    code, out, err = run("check", "plan.json", "--emulate")
    assert (code, err) == (0, "")
    assert out == f"{terminal.rehearsal_text(rehearsal())}\nwrote     plan.rehearsal.json\n"
    assert files.read("plan.rehearsal.json", Rehearsal) == rehearsal()
    assert run("check", "plan.json", "--emulate", "--json")[1] == files.to_json(rehearsal())


def test_show_writes_a_page_that_needs_neither_profile_nor_network(run, made):
    code, out, err = run("show", "plan.json", "--html", "report.html")
    assert (code, err) == (0, "")
    assert out.endswith("\nwrote     report.html\n")
    assert (made / "report.html").read_text() == html.report(plan(), measured=check_result())


def test_the_page_shows_the_layers_where_the_plan_s_profile_is_there(run, made):
    run(*PLAN)
    run("show", "plan.json", "--html", "report.html")
    expected = html.report(files.load("plan.json"), profile=profile(), cluster=cluster())
    assert (made / "report.html").read_text() == expected
    files.write(replace(profile(), noise=0.5), "gpt2.profile.json")
    run("show", "plan.json", "--html", "report.html")
    assert "which is not here or has changed since" in (made / "report.html").read_text()


def test_show_writes_both_timelines_as_a_trace(run, made):
    code, out, _ = run("show", "plan.json", "--trace", "trace.json")
    assert code == 0
    assert out.endswith("\nwrote     trace.json\n")
    assert (made / "trace.json").read_text() == trace_json([simulate_plan(plan()), check_result().timeline])


def test_show_why_explains_a_plan_whose_files_are_there(run, made):
    run(*PLAN)
    code, out, err = run("show", "plan.json", "--why")
    assert (code, err) == (0, "")
    reason = explanation(files.load("plan.json"), profile(), cluster())
    assert terminal.paragraph(reason) in out
    run("show", "plan.json", "--why", "--html", "report.html")
    assert escape(reason) in (made / "report.html").read_text()


def test_show_why_says_what_is_missing(run, made):
    code, out, err = run("show", "plan.json", "--why")
    assert (code, out) == (2, "")
    assert "examples/gpt2.profile.json does not exist; the plan names no cluster file. Plan again" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_page_that_cannot_be_written_is_one_line(run, made, option):
    code, out, err = run("show", "plan.json", option, "nowhere/out")
    assert (code, out) == (2, "")
    assert "nowhere/out cannot be written" in err


def test_show_leaves_out_the_check_of_another_plan(run, made):
    replace(plan(), noise=0.5).save("plan.json")
    code, out, _ = run("show", "plan.json")
    assert code == 0
    assert "not yet: run autopipe check" in out
    assert "predicted" not in out


def test_a_profile_is_planned_into_a_file_that_show_reads(run, made):
    code, out, err = run(*PLAN, "-o", "new.json")
    assert (code, err) == (0, "")
    written = files.load("new.json")
    assert (
        out
        == f"{terminal.plan_text(written, profile=profile(), cluster=cluster(), folder=Path())}\nwrote     new.json\n"
    )
    assert written.profile.path == "gpt2.profile.json"
    assert written.cluster.path == "cluster.json"
    assert (written.model.name, written.model.path) == ("gpt2.py", None)
    assert run("show", "new.json")[0] == 0


def test_json_is_the_plan_file_and_nothing_else(run, made):
    code, out, err = run(*PLAN, "--json")
    assert (code, err) == (0, "")
    assert out == (made / "plan.json").read_text()
    assert json.loads(out)["global_batch"] == 8


def test_paths_in_a_plan_are_relative_to_it(run, made):
    (made / "plans").mkdir()
    assert run(*PLAN, "-o", "plans/plan.json")[0] == 0
    assert files.load("plans/plan.json").profile.path == "../gpt2.profile.json"


def test_paths_are_printed_as_the_current_folder_sees_them(run, made, monkeypatch):
    (made / "plans").mkdir()
    _, planned, _ = run(*PLAN, "-o", "plans/plan.json")
    _, shown, _ = run("show", "plans/plan.json")
    for out in (planned, shown):
        assert re.search(r"^profile .* gpt2\.profile\.json$", out, re.MULTILINE)
        assert "../" not in out
    monkeypatch.chdir(made / "plans")
    assert re.search(r"^profile .* \.\./gpt2\.profile\.json$", run("show", "plan.json")[1], re.MULTILINE)


def test_paths_hold_behind_a_link_to_a_folder(run, made, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (made / "link").symlink_to(elsewhere)
    assert run(*PLAN, "-o", "link/plan.json")[0] == 0
    found = elsewhere / str(files.load("link/plan.json").profile.path)
    assert found.resolve() == (made / "gpt2.profile.json").resolve()


def test_devices_takes_the_first_of_the_cluster(run, made):
    many = Cluster("many", (Device("cpu", 2**32, 64),), (Tier("net", 64, Link(1e-5, 1e9)),))
    files.write(many, "cluster.json")
    assert run(*PLAN, "--devices", "2")[0] == 0
    made_plan = files.load("plan.json")
    assert made_plan.depth * made_plan.replicas <= 2


def test_options_reach_the_search(run, made):
    code, _, err = run(*PLAN, "--depth", "2", "--schedule", "GPipe", "--micro-batch", "1", "--optimizer", "sgd")
    assert (code, err) == (0, "")
    chosen = files.load("plan.json")
    assert (chosen.depth, chosen.schedule.name, chosen.micro_batch, chosen.optimizer) == (2, "GPipe", 1, "sgd")


def test_how_the_optimizer_keeps_its_state_is_asked_for(run, made):
    assert run(*PLAN, "--shard-optimizer")[0] == 0
    assert files.load("plan.json").sharded_optimizer
    code, out, err = run(*PLAN, "--master-weights")
    assert (code, out) == (2, "")
    assert "is float32: plan without" in err


def test_unequal_replicas_are_asked_for(run, made):
    """The bound is that of such plans too, so it is lower."""
    bounds = []
    for asked in ([], ["--unequal-replicas"]):
        assert run(*PLAN, *asked)[0] == 0
        bounds.append(files.load("plan.json").lower_bound_s)
    assert bounds[1] < bounds[0]


def test_a_pinned_layer_stays_on_its_stage(run, made):
    assert run(*PLAN, "--depth", "2", "--pin", "h.0=1")[0] == 0
    assert "h.0" in files.load("plan.json").stages[1].layers


def test_a_memory_limit_below_every_plan_is_exit_1(run, made):
    code, out, err = run(*PLAN, "--memory", "1MiB")
    assert (code, out) == (1, "")
    assert re.search(r"no plan fits.*iB.*iB", err)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (FileError("plan.json is odd"), 2, "autopipe: error: plan.json is odd"),
        (NoPlanFits("too small"), 1, "autopipe: error: too small"),
        (CheckFailed("broken"), 1, "autopipe: error: broken"),
        (ValueError("two\nlines"), 2, "autopipe: unexpected ValueError: two (run again with --debug)"),
        (ZeroDivisionError(), 2, "autopipe: unexpected ZeroDivisionError: no message (run again with --debug)"),
        (KeyboardInterrupt(), 130, "autopipe: interrupted"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_errors_are_one_line_and_their_exit_code(run, monkeypatch, error, code, line, debug):
    def fail(path):
        raise error

    monkeypatch.setattr("autopipe.workflow.open_plan", fail)
    found, out, err = run("show", "plan.json", *(["--debug"] if debug else []))
    assert (found, out) == (code, "")
    assert err.splitlines()[-1] == line
    traced = debug and code != 130
    assert ("Traceback" in err) == traced
    assert traced or err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_stands_anywhere(run, made, place):
    arguments = ["show", "none.json"]
    arguments.insert(place, "--debug")
    code, _, err = run(*arguments)
    assert code == 2
    assert "Traceback" in err


def imported(*arguments: str, cwd=None) -> set[str]:
    """The modules that a process has after it ran the command."""
    code = (
        "import sys; from autopipe.cli import main\n"
        f"sys.argv = ['autopipe', *{arguments!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["plan", "--help"], ["show", "plan.json", "--html", "r.html"], [str(a) for a in PLAN]],
)
def test_what_needs_no_model_needs_no_torch(made, arguments):
    assert "torch" not in imported(*arguments, cwd=made)


def test_help_loads_neither_numpy_nor_tables():
    assert not {"numpy", "rich.table", "cattrs"} & imported("--help")


UNIT = ("--forward", "1s", "--input-grad", "1s", "--weight-grad", "1s")


def test_schedule_explores_without_torch_and_prints_json(run):
    code, out, err = run("schedule", "zb-h1", "--ranks", 4, "--micro-batches", 8, *UNIT, "--json")
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert (content["schedule"], content["makespan_s"], max(content["peak_in_flight"])) == ("ZB-H1", 27, 4)
    assert {"stage_time_s", "idle", "stage_idle", "lower_bound_s", "order"} < set(content)


def test_schedule_prints_figures_and_lanes(run, tmp_path):
    page = tmp_path / "1f1b.html"
    shape = ("--ranks", 2, "--micro-batches", 2)
    code, out, _ = run("schedule", "1F1B", *shape, *UNIT, "--transfer", "500ms", "--html", page)
    assert code == 0
    assert page.read_text().startswith("<!doctype html>")
    assert "1F1B · 2 ranks · 2 stages · 2 micro-batches" in out
    assert re.search(r"^rank 1 ·+F+", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["1F1B", "--ranks", 4, "--micro-batches", 8, *UNIT, "--memory-cap", 3], 1, "the cap is 3"),
        (["1F1B", "--ranks", 4, "--micro-batches", 8, "--forward", "1s"], 2, "seconds are missing"),
        (["1F1B", "--ranks", 4, "--micro-batches", 8, *UNIT[:-1], "7"], 2, "'7' is not a duration"),
        (["ZB-V", "--ranks", 4, "--stages", 9, "--micro-batches", 8, *UNIT], 2, "9 stages cannot be shared"),
        (["none.csv", "--ranks", 4, "--micro-batches", 8, *UNIT], 2, "none.csv cannot be read"),
        (["1F1B", "--ranks", 4, "--micro-batches", 8, "--costs", "none.json"], 2, "none.json does not exist"),
    ],
)
def test_schedule_tells_what_cannot_be_meant(run, arguments, code, message):
    found, out, err = run("schedule", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1
