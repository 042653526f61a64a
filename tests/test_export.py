"""What every trainer gets of a plan: golden files, digests, losses, and refusals before anything is written.

``UPDATE_GOLDEN=1 pytest tests/test_export.py`` writes the files anew; read the difference before keeping it.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe import __version__, cli, export, search
from autopipe.core import files
from autopipe.core.errors import CannotExport, UsageError
from autopipe.core.optimizer import Optimizer
from autopipe.core.plan import FileRef, ModelRef, Plan, TiedParameter
from autopipe.core.profile import Jitter, Profile
from autopipe.core.reduction import Reduction
from autopipe.core.schedule import Action, Schedule
from autopipe.core.stage import stage_cost
from autopipe.export.heading import heading
from autopipe.export.remaining import predict, remaining
from autopipe.export.trainer import Trainer
from autopipe.simulate import simulate
from tests.exports import interleaved, llama, one_f_one_b, plan_of
from tests.synthetic import cluster

GOLDEN = Path(__file__).parent / "golden" / "export"
TRAINERS = [trainer.name for trainer in export.trainers()]
BLOCKS = tuple(f"model.layers.{i}" for i in range(6))
V = Schedule(
    "V",
    (0, 1, 1, 0),
    tuple(
        tuple(map(Action.parse, row.split()))
        for row in (
            "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 0F3 3F2 3B2 0B1 3F3 3B3 0B2 0B3",
            "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 1F3 2F3 2B2 1B2 2B3 1B3",
        )
    ),
)


def uneven() -> Plan:
    """Two stages of a Llama with six blocks: two and four."""
    model = ModelRef("llama.py", "models/llama.py", digest="ab" * 32)
    return plan_of(llama(6), [3], one_f_one_b(2, 4), model=model)


def lossy() -> Plan:
    """Four stages in a V, two of six blocks recomputing: more than most trainers can express."""
    return plan_of(llama(6), [2, 4, 6], V, recompute=BLOCKS[:2])


def exported(plan: Plan, name: str) -> dict[str, str]:
    """The files with their heading, as the command writes them."""
    trainer = export.trainer(name)
    rest = remaining(plan, trainer)
    return trainer.files(plan, heading(plan, trainer, rest, predict(plan, rest, llama(6))))


def check_golden(found: dict[str, str], folder: Path, digest: str) -> None:
    """The files are those of the folder, but for the digest."""
    found = {file: text.replace(digest, "<digest>") for file, text in found.items()}
    if os.environ.get("UPDATE_GOLDEN"):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in found.items():
            (folder / file).write_text(text)
    assert sorted(found) == sorted(path.name for path in folder.iterdir())
    for file, text in found.items():
        assert text == (folder / file).read_text(), file


@pytest.mark.parametrize("name", TRAINERS)
def test_an_uneven_split_is_written_as_the_golden_files(name):
    check_golden(exported(uneven(), name), GOLDEN / name, uneven().digest)


@pytest.mark.parametrize("name", TRAINERS)
def test_every_artefact_says_which_plan_and_which_versions(name):
    for file, text in exported(uneven(), name).items():
        if file != "schedule.csv":
            assert uneven().digest in text, file
            assert f"autopipe {__version__}" in text, file
            assert export.trainer(name).target in text, file


@pytest.mark.parametrize("name", TRAINERS)
def test_python_files_are_python_and_json_is_json(name):
    for file, text in exported(uneven(), name).items():
        if file.endswith(".py"):
            ast.parse(text)
        if file.endswith(".json"):
            json.loads(text)


def test_the_script_imports_torch_and_nothing_of_autopipe():
    tree = ast.parse(exported(uneven(), "torch")["train_pipeline.py"])
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    outside = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert outside == {"torch"}


@pytest.mark.parametrize("reduction", [Reduction("mean"), Reduction("count", "inputs.labels", -100, 1)], ids=str)
def test_the_script_passes_the_linter(tmp_path, reduction):
    pytest.importorskip("ruff", reason="the linter is not installed")
    plan = replace(uneven(), reduction=reduction)
    (tmp_path / "train_pipeline.py").write_text(exported(plan, "torch")["train_pipeline.py"])
    options = ["--isolated", "--line-length", "120", "--target-version", "py310"]
    for command in (["check", "--select", "E,F,W,I,B,D1", "--ignore", "D105,D107"], ["format", "--diff"]):
        arguments = [sys.executable, "-m", "ruff", *command, *options, "."]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_csv_is_the_table():
    rows = exported(uneven(), "torch")["schedule.csv"].splitlines()
    assert [tuple(row.split(",")) for row in rows] == list(uneven().schedule.order)


# --- names, coverage ---


def broken(plan: Plan, stage: int, **changes: object) -> Plan:
    """The plan with one stage changed."""
    stages = [replace(each, **changes) if each.index == stage else each for each in plan.stages]
    return replace(plan, stages=tuple(stages))


def edited(stage: int, edit) -> Plan:
    plan = uneven()
    return broken(plan, stage, layers=tuple(edit(list(plan.stages[stage].layers))))


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (edited(1, lambda layers: layers[:1] + layers[2:]), "a layer is forgotten or too many"),
        (edited(1, lambda layers: [*layers[:-1], "model.layers.1"]), "'model.layers.1' is there 2 times"),
        (edited(1, lambda layers: ["model.layrs.2", *layers[1:]]), "no module 'model.layrs.2'"),
    ],
    ids=["forgotten", "doubled", "misspelt"],
)
def test_a_plan_that_is_not_whole_is_refused_by_every_trainer(name, plan, message):
    with pytest.raises(CannotExport, match=message):
        export.trainer(name).files(plan)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_file_with_an_empty_stage_is_no_plan(run, tmp_path, name):
    content = json.loads(files.to_json(uneven()))
    content["stages"][0]["layers"] = []
    (tmp_path / "plan.json").write_text(json.dumps(content))
    code, out, err = run("export", "plan.json", "--to", name, "-o", "out")
    assert (code, out) == (2, "")
    assert "stage 0 has no layers: every stage needs one" in err
    assert not (tmp_path / "out").exists()


EVIL = '"""\nimport evil\nevil()\n"+evil()+"\\'


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_plan_s_file_holds_never_runs(name):
    """Names of the model, its builder, layers and ties come from a file that anyone may have written."""
    profile = llama(6)
    evil = [f"{EVIL}.{layer.name}" for layer in profile.layers]
    layers = tuple(replace(x, name=new, modules=(new,)) for x, new in zip(profile.layers, evil, strict=True))
    model = ModelRef(EVIL, EVIL + "/model.py", EVIL, EVIL)
    plan = plan_of(replace(profile, layers=layers), [3], one_f_one_b(2, 4), model=model)
    if name in ("deepspeed", "torch"):
        plan = replace(plan, ties=(TiedParameter(EVIL, (0, 1), 4),))
    if name == "torch":
        plan = replace(plan, reduction=Reduction("count", f"target.{EVIL}", -100))
    for file, text in exported(plan, name).items():
        assert "evil" in text or file == "schedule.csv"
        if file.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                assert "evil" not in getattr(node, "id", "")
                assert not any("evil" in alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name"))
        elif not file.endswith(".json"):
            assert all(line.startswith("#") for line in text.splitlines() if "evil" in line)


def test_a_count_of_something_else_than_the_batch_is_refused():
    with pytest.raises(CannotExport, match=r"counts 'evil\(\)\.x', which is not of inputs or target"):
        export.trainer("torch").files(replace(uneven(), reduction=Reduction("count", "evil().x")))


def renamed(old: str, new: str) -> Plan:
    profile = llama(6)
    layers = tuple(replace(layer, name=new, modules=(new,)) if layer.name == old else layer for layer in profile.layers)
    return plan_of(replace(profile, layers=layers), [3], one_f_one_b(2, 4))


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "automodel"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lm_head", "classifier", "layer 'classifier' has no name"),
        ("model.norm", "model.adapter", "layer 'model.adapter' has no name"),
        ("model.layers.4", "model.layers.7", "'model.layers.7' comes where number 4"),
        ("model.norm", "model.wte", "'model.wte' .* comes behind"),
    ],
)
def test_a_layer_without_a_name_in_the_trainer_is_named(name, old, new, message):
    with pytest.raises(CannotExport, match=message):
        export.trainer(name).files(renamed(old, new))


@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_a_position_embedding_has_no_place_in_a_llama(name):
    with pytest.raises(CannotExport, match=r"layer 'model.wpe' \(positions\) has no name"):
        export.trainer(name).files(plan_of(with_positions(), [3], one_f_one_b(2, 4)))


def with_positions() -> Profile:
    """Five blocks behind an embedding of tokens and one of positions."""
    profile = llama(6)
    names = ["model.embed_tokens", "model.wpe", *(f"model.layers.{i}" for i in range(5)), "model.norm", "lm_head"]
    layers = tuple(
        replace(layer, name=name, modules=(name,)) for layer, name in zip(profile.layers, names, strict=True)
    )
    return replace(profile, layers=layers)


@pytest.mark.parametrize("name", ["torchtitan", "automodel"])
def test_tied_parameters_on_two_stages_are_refused(name):
    tied = replace(uneven(), ties=(TiedParameter("lm_head.weight", (0, 1), 4),))
    with pytest.raises(CannotExport, match=r"lm_head.weight.*0, 1.*Untie"):
        export.trainer(name).files(tied)


def test_megatron_keeps_norm_and_head_together_and_says_how_to_plan_that():
    apart = plan_of(llama(6), [8], one_f_one_b(2, 4))
    with pytest.raises(CannotExport, match=r"--pin model\.norm=1 --pin lm_head=1"):
        export.trainer("megatron").files(apart)


def test_a_module_that_runs_twice_has_no_one_place():
    profile = llama(6)
    again = replace(profile.layers[7], name="model.layers.0@1", modules=("model.layers.0",))
    layers = (*profile.layers[:7], again, profile.layers[8])
    plan = plan_of(replace(profile, layers=layers), [3], one_f_one_b(2, 4))
    for name in ("torch", "device-map", "accelerate"):
        with pytest.raises(CannotExport, match=r"'model\.layers\.0' runs more than once"):
            export.trainer(name).files(plan)


def test_the_script_cuts_only_where_one_tensor_crosses():
    plan = uneven()
    edge = plan.stages[0].sends[0]
    for sends, said in (
        ((edge, replace(edge, name="skip")), "2 values cross the cut before 'model.layers.2'"),
        ((replace(edge, producer=0),), "relayed"),
        ((replace(edge, needs_gradient=False),), "without a gradient"),
    ):
        with pytest.raises(CannotExport, match=said):
            export.trainer("torch").files(broken(plan, 0, sends=sends))


def test_the_script_does_not_cut_before_the_first_block():
    early = plan_of(with_positions(), [1], one_f_one_b(2, 4))
    with pytest.raises(CannotExport, match="before the first block"):
        export.trainer("torch").files(early)


# --- what is lost ---


def test_nothing_is_lost_where_the_trainer_can_express_it_all():
    for name in TRAINERS:
        assert remaining(uneven(), export.trainer(name)).losses == ()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("torch", []),
        ("torchtitan", ["recomputation of 2 of 9 layers"]),
        ("automodel", ["recomputation of 2 of 9 layers"]),
        ("megatron", ["schedule V: megatron runs Interleaved1F1B", "placement 0 1 1 0", "recomputation of 2 of 9"]),
        ("counts", []),
        ("device-map", []),
    ],
)
def test_what_a_trainer_cannot_express_is_listed(name, lost):
    losses = remaining(lossy(), export.trainer(name)).losses
    assert len(losses) == len(lost)
    assert all(said.startswith(start) for said, start in zip(losses, lost, strict=True))


def test_what_remains_is_priced_by_the_simulator():
    plan, profile = lossy(), llama(6)
    rest = remaining(plan, export.trainer("megatron"))
    found = predict(plan, rest, profile)
    kept = plan_of(profile, plan.cuts, interleaved(2, 2, 4), recompute=BLOCKS)
    costs = [stage.costs for stage in kept.stages]
    assert found.step_s == pytest.approx(simulate(rest.schedule, costs, kept.hops).step_s, rel=1e-9)
    assert found.step_s != pytest.approx(plan.predicted.step_s, rel=1e-3)


def test_what_remains_is_compared_with_the_plan_by_the_same_measure():
    """A plan that loses nothing is neither faster nor slower than itself, with its jitter or without."""
    profile = replace(llama(6), jitter=Jitter(1e-4, (0.7, 0.9, 1.0, 1.1, 2.0)))
    plan = search.plan(profile, cluster(2), global_batch=16, depths=[2], replicas=[1], micro_batches=[2])
    assert plan.predicted.jitter_s > 0.01 * plan.predicted.step_s
    rest = remaining(plan, export.trainer("torch"))
    for known, said in ((profile, True), (None, False)):
        found = predict(plan, rest, known)
        assert found.step_s == pytest.approx(found.planned_s, rel=1e-9)
        assert found.jitter is said
    megatron = export.trainer("megatron")
    assert "both without jitter" in heading(plan, megatron, replace(rest, losses=("x",)), found)[-1]


def test_without_the_profile_other_recomputation_has_no_price():
    plan = lossy()
    rest = remaining(plan, export.trainer("megatron"))
    assert predict(plan, rest, None) is None
    assert "unknown without the plan's profile" in "\n".join(heading(plan, export.trainer("megatron"), rest, None))


def test_a_table_that_only_bears_a_stock_name_is_a_loss():
    plan = uneven()
    rows = list(plan.schedule.order)
    rows[0] = tuple(sorted(rows[0], key=lambda text: text[1] == "B"))
    edited = replace(plan, schedule=replace(plan.schedule, order=tuple(rows)))
    assert remaining(edited, export.trainer("megatron")).losses == ("schedule 1F1B: megatron runs 1F1B",)


def test_a_loss_that_is_no_mean_is_lost_where_micro_batches_are_averaged():
    plan = replace(uneven(), reduction=Reduction("sum"))
    for name in TRAINERS:
        lost = remaining(plan, export.trainer(name)).losses
        assert [line.partition(":")[0] for line in lost] == ["the loss, a sum over rows"] * (name == "deepspeed")


def test_recomputing_everything_is_no_loss():
    names = [layer.name for layer in llama(6).layers]
    plan = plan_of(llama(6), [3], one_f_one_b(2, 4), recompute=names)
    for name in TRAINERS:
        assert remaining(plan, export.trainer(name)).losses == ()
    assert "--recompute-granularity full" in exported(plan, "megatron")["megatron_lm.sh"]
    assert "FullAC.Config()" in exported(plan, "torchtitan")["autopipe_torchtitan.py"]
    assert "activation_checkpointing: true" in exported(plan, "automodel")["pipeline.yaml"]
    assert "activation_checkpoint_interval=1" in exported(plan, "deepspeed")["deepspeed_pipeline.py"]


# --- how the optimizer keeps its state ---


def kept_otherwise():
    """Two replicas of a bf16 model that share out an optimizer with master weights, and the profile."""
    layers = tuple(
        replace(layer, parameter_bytes=400, parameters=200, trainable_bytes=None) for layer in llama(6).layers
    )
    profile = replace(llama(6), layers=layers, dtype="bfloat16")
    made = plan_of(profile, [4], one_f_one_b(2, 4))
    update = Optimizer("adamw", True, 2)
    costs = [
        replace(stage_cost(profile, stage.start, stage.stop, 2, optimizer=update), reduce_s=3.0)
        for stage in made.stages
    ]
    stages = tuple(replace(stage, costs=cost) for stage, cost in zip(made.stages, costs, strict=True))
    changes = {"replicas": 2, "global_batch": 2 * made.global_batch, "dtype": "bfloat16"}
    return replace(made, stages=stages, master_weights=True, sharded_optimizer=True, **changes), profile


def test_trainers_keep_the_state_as_planned_or_say_so():
    plan, _ = kept_otherwise()
    shared = "the optimizer's state shared out to 2 replicas"
    lost = {
        "torch": ["master weights", shared],
        "torchtitan": ["master weights", shared],
        "automodel": ["master weights"],
    }
    for name in TRAINERS:
        losses = remaining(plan, export.trainer(name)).losses
        assert [said.partition(":")[0] for said in losses] == lost.get(name, []), name
    megatron = exported(plan, "megatron")
    assert "--use-distributed-optimizer\n" in megatron["megatron_lm.sh"]
    assert "--use_distributed_optimizer true\n" in megatron["ms_swift.sh"]
    assert "cfg.ddp.use_distributed_optimizer = True" in megatron["megatron_bridge.py"]
    settings = json.loads(exported(plan, "deepspeed")["ds_config.json"])
    assert (settings["zero_optimization"], settings["bf16"]) == ({"stage": 1}, {"enabled": True})


def test_state_that_a_trainer_keeps_otherwise_is_priced():
    """Whole and of 16 bits: 4 bytes for each parameter instead of 6, and nothing is handed round."""
    plan, profile = kept_otherwise()
    rest = remaining(plan, export.trainer("torch"))
    found = predict(plan, rest, profile)
    bare = [
        replace(stage_cost(profile, stage.start, stage.stop, 2, optimizer="adamw"), reduce_s=2.0)
        for stage in plan.stages
    ]
    again = simulate(rest.schedule, bare, plan.hops)
    assert (found.step_s, found.peak_bytes) == (pytest.approx(again.step_s), again.peak_bytes)
    assert predict(plan, rest, None) is None


@pytest.mark.parametrize(
    ("name", "message"), [("deepspeed", "1F1B takes 1 stage a rank, not 2"), ("accelerate", "4 stages on 2 ranks")]
)
def test_several_stages_on_a_rank_are_refused_where_there_is_no_way(name, message):
    with pytest.raises(CannotExport, match=message):
        exported(lossy(), name)


def test_torchtitan_places_stages_by_the_schedule_s_name():
    assert '"ZBVZeroBubble"' in exported(lossy(), "torchtitan")["autopipe_torchtitan.py"]
    loop = plan_of(llama(6), [2, 4, 6], interleaved(2, 2, 4))
    assert '"Interleaved1F1B"' in exported(loop, "torchtitan")["autopipe_torchtitan.py"]


@pytest.mark.parametrize("name", ["torchtitan", "automodel", "megatron", "deepspeed", "accelerate"])
def test_one_stage_is_no_pipeline(name):
    alone = plan_of(llama(6), [], one_f_one_b(1, 4))
    with pytest.raises(CannotExport, match=r"one stage.*on 1 device, with 4 micro-batches of 2"):
        export.trainer(name).files(alone)


def replicated(count: int) -> Plan:
    """The uneven plan on several pipelines."""
    return replace(uneven(), replicas=count, global_batch=count * uneven().global_batch)


@pytest.mark.parametrize(
    ("name", "file", "said"),
    [
        ("torch", "train_pipeline.py", "RANKS, REPLICAS = 2, 3"),
        ("torchtitan", "autopipe_torchtitan.py", "parallelism.data_parallel_replicate_degree = 3"),
        ("automodel", "pipeline.yaml", "dp_size: 3"),
        ("megatron", "megatron_lm.sh", "--global-batch-size 24"),
        ("deepspeed", "ds_config.json", '"train_batch_size": 24'),
    ],
)
def test_replicas_are_written_where_the_trainer_takes_them(name, file, said):
    text = exported(replicated(3), name)[file]
    assert said in text
    assert "2 stages on 2 ranks × 3 replicas = 6 processes, 1F1B, 4 micro-batches of 2, global batch 24" in text


@pytest.mark.parametrize("name", ["accelerate", "device-map", "counts"])
def test_a_split_says_that_it_has_no_replicas(name):
    assert all("replicas are not in this file" in text for text in exported(replicated(3), name).values())


# --- files ---


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "", "a\\b"])
def test_file_names_never_leave_the_folder(name):
    trainer = Trainer("bad", "bad 1", lambda plan, heading: {name: "text"})
    with pytest.raises(CannotExport, match="would leave the folder"):
        trainer.files(uneven())


def test_an_unknown_trainer_is_told_the_known_ones():
    with pytest.raises(
        UsageError, match="accelerate, automodel, counts, deepspeed, device-map, megatron, torch, torch"
    ):
        export.trainer("nope")


# --- the command ---


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["autopipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code or 0, *capsys.readouterr())

    return run


def test_the_command_writes_into_a_new_folder_and_says_what(run, tmp_path):
    uneven().save("plan.json")
    code, out, err = run("export", "plan.json", "--to", "counts", "-o", "deep/out")
    assert (code, err) == (0, "")
    assert (tmp_path / "deep/out/counts.txt").read_text().splitlines()[-1] == "2,4"
    assert out.splitlines()[-1] == "wrote     deep/out/counts.txt"


def test_the_model_s_path_is_seen_from_the_folder(run, tmp_path):
    uneven().save("plan.json")
    run("export", "plan.json", "--to", "torch", "-o", "deep/out")
    text = (tmp_path / "deep/out/train_pipeline.py").read_text()
    assert 'MODEL = HERE / "../../models/llama.py"' in text
    assert uneven().digest in text


def test_a_lossy_export_fails_with_the_list_and_writes_nothing(run, tmp_path):
    profile = llama(6)
    files.write(profile, "llama.profile.json")
    replace(lossy(), profile=FileRef(profile.digest, "llama.profile.json")).save("plan.json")
    code, out, err = run("export", "plan.json", "--to", "megatron", "-o", "out")
    assert (code, out) == (1, "")
    assert "schedule V: megatron runs Interleaved1F1B" in err
    assert "recomputation of 2 of 9 layers" in err
    assert "--allow-lossy" in err
    assert not (tmp_path / "out").exists()


def test_a_lossy_export_that_is_allowed_carries_its_losses_and_its_price(run, tmp_path):
    profile = llama(6)
    files.write(profile, "llama.profile.json")
    plan = replace(lossy(), profile=FileRef(profile.digest, "llama.profile.json"))
    plan.save("plan.json")
    code, _, err = run("export", "plan.json", "--to", "megatron", "-o", "out", "--allow-lossy")
    assert (code, err) == (0, "")
    found = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    check_golden(found, GOLDEN.parent / "export_lossy", plan.digest)
    assert "# predicted for what remains: " in found["megatron_lm.sh"]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_broken_plan_writes_nothing(run, tmp_path, name):
    text = files.to_json(uneven()).replace('"model.layers.3"', '"model.layers.33"', 1)
    (tmp_path / "plan.json").write_text(text)
    code, out, err = run("export", "plan.json", "--to", name, "-o", "out")
    assert (code, out) == (1, "")
    assert "model.layers.33" in err
    assert not (tmp_path / "out").exists()


def test_exporting_needs_no_torch(tmp_path):
    uneven().save(tmp_path / "plan.json")
    code = (
        "import sys; from autopipe.cli import main\n"
        "sys.argv = ['autopipe', 'export', 'plan.json', '--to', 'torch', '-o', 'out']\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["False"]
    assert (tmp_path / "out" / "train_pipeline.py").exists()
