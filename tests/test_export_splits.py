"""Splits made elsewhere: what is read, what is refused, and that reading undoes writing, also by Megatron's parser."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from autopipe import cli, export
from autopipe.core import files
from autopipe.core.errors import AutopipeError, UsageError
from autopipe.core.plan import Plan
from autopipe.core.schedule import kind
from autopipe.export.megatron import layout
from autopipe.export.megatron_layout import read_layout, write_layout
from autopipe.export.splits import read_split
from tests.exports import LINK, interleaved, llama, one_f_one_b, plan_of
from tests.synthetic import cluster

LAYERS = tuple(layer.name for layer in llama(6).layers)


def spelt(counts: list[int]) -> tuple[str, ...]:
    """Stages with so many blocks; E and L stand in the outer ones, which may have none."""
    stages = ["t" * count for count in counts]
    return ("E" + stages[0], *stages[1:-1], stages[-1] + "L")


counts = st.lists(st.integers(1, 12), min_size=2, max_size=8)


@given(counts, st.booleans(), st.booleans())
def test_reading_a_layout_undoes_writing_it(numbers, bare_first, bare_last):
    numbers = [*([0] if bare_first else []), *numbers, *([0] if bare_last else [])]
    assert read_layout(write_layout(spelt(numbers))) == spelt(numbers)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Ett|tttL", ("Ett", "tttL")),
        ("E,tt|ttt,L", ("Ett", "tttL")),
        ("Et*3|(tt|)*2,tL", ("Ettt", "tt", "tt", "tL")),
        ("E|t*4|L", ("E", "tttt", "L")),
        ("E(t|)*3L", ("Et", "t", "t", "L")),
    ],
)
def test_the_forms_that_megatron_knows_are_read(text, stages):
    assert read_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett||tL", "stage 1 is empty"),
        ("Ett|tL|", "stage 2 is empty"),
        ("Et*0|tL", "'t\\*0' repeats nothing"),
        ("E(t|)*0tL", "repeats nothing"),
        ("Ett|tmL", "leave out m"),
        ("Ett | tL", "' ' is not E, t or L"),
        ("ett|tL", "'e' is not E, t or L"),
        ("E((t|)*2)*2L", "is not E, t or L"),
        ("tt|tL", "one E comes first"),
        ("Et|t", "one L last"),
        ("EEt|tL", "2 E"),
        ("EL", "0 t"),
        ("", "stage 0 is empty"),
    ],
)
def test_a_layout_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        read_layout(text)


@st.composite
def plans(draw):
    """A Llama on some ranks, one or two stages each, cut between blocks."""
    ranks, per_rank = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    numbers = draw(st.lists(st.integers(1, 4), min_size=ranks * per_rank, max_size=ranks * per_rank))
    ends = [1 + sum(numbers[: stage + 1]) for stage in range(len(numbers) - 1)]
    made = interleaved(ranks, per_rank, 2 * ranks) if per_rank > 1 else one_f_one_b(ranks, 2 * ranks)
    first, last = draw(st.booleans()), draw(st.booleans())
    if first:
        ends = [1, *ends[1:]]
    if last:
        ends = [*ends[:-1], 1 + sum(numbers)]
    assume(len({*ends}) == len(ends))
    return plan_of(llama(sum(numbers)), sorted(ends), made)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_a_plan_s_layout_and_counts_are_read_back_as_its_cuts(plan):
    names = tuple(name for stage in plan.stages for name in stage.layers)
    assert read_split(f"megatron:{layout(plan)}", names).cuts == plan.cuts


@given(plans())
@settings(max_examples=60, deadline=None)
def test_megatron_s_own_parser_gives_the_same_map(plan):
    parser = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", reason="megatron-core is not installed"
    )
    blocks = sum(name.startswith("model.layers.") for stage in plan.stages for name in stage.layers)
    parsed = parser.PipelineParallelLayerLayout(layout(plan), plan.depth)
    parsed.validate_layer_layout(num_layers=blocks, mtp_num_layers=0)
    letter = {parser.LayerType.embedding: "E", parser.LayerType.decoder: "t", parser.LayerType.loss: "L"}
    theirs = [parsed.layout[stage.rank][stage.index // plan.depth] for stage in plan.stages]
    assert tuple("".join(letter[kind] for kind in stage) for stage in theirs) == read_layout(layout(plan))
    for stage in plan.stages:
        kinds = parsed.layout[stage.rank][stage.index // plan.depth]
        assert kinds.count(parser.LayerType.decoder) == sum(name.startswith("model.layers.") for name in stage.layers)
        assert (parser.LayerType.embedding in kinds) == ("model.embed_tokens" in stage.layers)
        assert (parser.LayerType.loss in kinds) == ("lm_head" in stage.layers)


repeated = st.builds("{}*{}".format, st.sampled_from(["t", "(t)", "(t|)", "(|t)", "(tt|t|)"]), st.integers(1, 12))
layouts = st.lists(st.sampled_from("tt|,") | repeated, min_size=1, max_size=8).map("".join)


@given(st.builds("{}{}{}".format, st.sampled_from(["E", "E,", "E|"]), layouts, st.sampled_from(["L", "|L"])))
@settings(max_examples=300, deadline=None)
def test_what_our_reader_takes_megatron_s_parser_takes_alike(text):
    parser = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", reason="megatron-core is not installed"
    )
    try:
        stages = read_layout(text)
    except UsageError:
        reject()
    theirs = parser.PipelineParallelLayerLayout.parse_str_to_list(text)
    letter = {parser.LayerType.embedding: "E", parser.LayerType.decoder: "t", parser.LayerType.loss: "L"}
    assert tuple("".join(letter[kind] for kind in stage) for stage in theirs) == stages


def test_a_torchtitan_module_is_read_back_as_its_cuts(tmp_path):
    plan = plan_of(llama(6), [3, 5, 8], interleaved(2, 2, 4))
    path = tmp_path / "exported.py"
    path.write_text(export.trainer("torchtitan").files(plan)["autopipe_torchtitan.py"])
    assert read_split(f"torchtitan:{path}", LAYERS).cuts == plan.cuts


def test_a_keyword_is_read_and_nothing_is_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        'raise SystemExit\np = ParallelismConfig(module_fqns_per_model_part=[["tok_embeddings", "layers.0"], '
        '["layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "norm", "lm_head"]])\n'
    )
    assert read_split(f"torchtitan:{path}", LAYERS).cuts == (2,)


def modules(*stages: list[str]) -> str:
    return f"module_fqns_per_model_part = {[*stages]}"


HEAD, TAIL = ["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3", "layers.4", "layers.5", "norm"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (modules(HEAD, [*TAIL, "output"]), "'output' is no module of the model"),
        (modules(HEAD, TAIL), "'lm_head' is forgotten"),
        (modules(HEAD, [*TAIL, "norm", "lm_head"]), "doubled"),
        (modules(HEAD, [], [*TAIL, "lm_head"]), "empty"),
        ("x = 1", "holds no module_fqns_per_model_part"),
        ("x = (", "cannot be read as Python"),
        ("module_fqns_per_model_part = parts()", "holds no"),
    ],
)
def test_a_torchtitan_file_that_does_not_fit_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(AutopipeError, match=message):
        read_split(f"torchtitan:{path}", LAYERS)


def test_counts_are_blocks():
    assert read_split("counts:1,2,3", LAYERS).cuts == (2, 4)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("counts:3,4", "are 7 blocks, the model has 6"),
        ("counts:0,6", "at least one"),
        ("counts:a,b", "no list of numbers"),
        ("megatron:Ett|tttL", "has 5 t, the model 6 blocks"),
        ("3,3", "write one of megatron:…, counts:…, torchtitan:…"),
        ("galvatron:3,3", "write one of"),
    ],
)
def test_a_split_that_does_not_fit_the_model_is_refused(split, message):
    with pytest.raises(UsageError, match=message):
        read_split(split, LAYERS)


# --- autopipe plan --from ---


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    files.write(llama(6), "llama.profile.json")
    files.write(cluster(3, link=LINK), "cluster.json")

    def run(*arguments):
        given = ["plan", "llama.profile.json", "--cluster", "cluster.json", "--global-batch", "8", *arguments]
        monkeypatch.setattr(sys, "argv", ["autopipe", *given])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("split", "cuts"), [("megatron:Ett|ttttL", (3,)), ("counts:1,5", (2,)), ("counts:2,2,2", (3, 5))]
)
def test_a_split_from_elsewhere_is_planned_as_it_is_and_compared(run, split, cuts):
    code, out, err = run("--from", split)
    assert (code, err) == (0, "")
    planned = files.load("plan.json")
    assert planned.cuts == cuts
    yours, ours = (line.split() for line in [next(line for line in out.splitlines() if line.startswith("yours"))] * 2)
    assert float(yours[1]) >= float(ours[4])


@pytest.mark.parametrize(
    ("split", "schedule", "placement"),
    [
        ("megatron:Et|tt|tt|tL", "Interleaved1F1B", (0, 1, 0, 1)),
        ("counts:1,2,2,1", "Interleaved1F1B", (0, 1, 0, 1)),
        ("counts:1,1,1,1,1,1", "Interleaved1F1B", (0, 1, 0, 1, 0, 1)),
    ],
)
def test_a_split_with_several_stages_on_a_device_is_planned(run, split, schedule, placement):
    code, out, err = run("--from", split, "--devices", "2")
    assert (code, err) == (0, "")
    planned = files.load("plan.json")
    assert planned.cuts == read_split(split, LAYERS).cuts
    assert (planned.schedule.name, planned.schedule.placement) == (schedule, placement)
    assert re.search(r"^yours [\d.]+ m?s, ours [\d.]+ m?s$", out, re.MULTILINE)


def test_a_split_runs_on_fewer_ranks_where_that_is_asked_for(run):
    code, _, err = run("--from", "counts:1,2,2,1", "--devices", "3", "--depth", "2")
    assert (code, err) == (0, "")
    assert files.load("plan.json").schedule.placement == (0, 1, 0, 1)


def test_ours_may_have_the_schedule_that_yours_is_run_by(run, tmp_path):
    """Else a good schedule of theirs would look like a good split."""
    asked = ("--devices", "2", "--micro-batch", "2", "--depth", "2", "--replicas", "1")
    assert run(*asked, "--schedule", "ZB-V")[0] == 0
    best = files.load("plan.json")
    (tmp_path / "mine.py").write_text(export.trainer("torchtitan").files(best)["autopipe_torchtitan.py"])
    _, out, _ = run("--from", "torchtitan:mine.py", *asked)
    yours, ours = re.search(r"^yours (.*), ours (.*)$", out, re.MULTILINE).groups()
    assert yours == ours


def test_a_megatron_split_is_predicted_with_what_megatron_runs(run):
    run("--from", "megatron:Ett|ttttL", "--devices", "2")
    assert files.load("plan.json").schedule.name == "1F1B"
    run("--from", "megatron:Ett|ttttL", "--devices", "2", "--schedule", "GPipe")
    assert files.load("plan.json").schedule.name == "GPipe"


def test_a_torchtitan_module_is_planned_with_the_schedule_that_it_names(run, tmp_path):
    made = plan_of(llama(6), [2, 4, 6], kind("ZB-V").schedule(2, 4, stages_per_rank=2))
    (tmp_path / "mine.py").write_text(export.trainer("torchtitan").files(made)["autopipe_torchtitan.py"])
    code, _, err = run("--from", "torchtitan:mine.py", "--devices", "2", "--micro-batch", "2")
    assert (code, err) == (0, "")
    planned = files.load("plan.json")
    assert (planned.cuts, planned.schedule.name) == (made.cuts, "ZB-V")
    assert planned.schedule.placement == made.schedule.placement


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["counts:2,2,2", "--devices", "2"], "3 stages, which 2 devices cannot share equally: use --devices 1 or 3"),
        (["counts:1,2,2,1", "--devices", "2", "--schedule", "1F1B"], "1F1B takes 1 stage a rank, not 2"),
        (["counts:2,4", "--depth", "3"], "2 stages, which --depth 3 cannot share equally: use --depth 1 or 2"),
        (["counts:2,4", "--depth", "1,2"], "--from takes one --depth, not 1, 2"),
        (["counts:2,4", "--pin", "lm_head=1"], "--from says where every layer goes, and so does --pin"),
        (["torchtitan:gone.py"], "gone.py cannot be read: No such file or directory"),
    ],
)
def test_a_split_that_the_devices_cannot_hold_is_refused(run, arguments, message):
    code, out, err = run("--from", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_json_of_a_split_is_the_plan_alone(run):
    code, out, err = run("--from", "counts:2,4", "--json")
    assert code == 0
    assert files.from_json(out, Plan) == files.load("plan.json")
    assert err.startswith("yours ")
