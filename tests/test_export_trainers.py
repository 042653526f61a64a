"""The artefacts in the trainers' own code where a wheel is installed, else in the least that stands for it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import types
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path

import pytest

from autopipe import export
from autopipe.core.errors import CannotExport
from autopipe.core.plan import Plan
from tests.exports import interleaved, llama, one_f_one_b, plan_of

ROOT = Path(__file__).parents[1]


def uneven() -> Plan:
    return plan_of(llama(6), [3], one_f_one_b(2, 4))


def write(name: str, folder: Path, plan: Plan | None = None) -> None:
    for file, text in export.trainer(name).files(plan or uneven()).items():
        (folder / file).write_text(text)


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torchrun(ranks: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", port]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # a compilation that was once broken off leaves a lock, for which every later one waits without end
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    return subprocess.run(
        [*run, "--nproc-per-node", str(ranks), *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


# --- torchtitan ---


COMMON = (
    "pipeline_parallel_degree data_parallel_replicate_degree pipeline_parallel_schedule "
    "pipeline_parallel_schedule_csv module_fqns_per_model_part"
)
PARALLELISM = {
    "0.3": f"{COMMON} pipeline_parallel_microbatch_size",
    "main": f"{COMMON} num_pp_microbatches",
}
TRAINING = {
    "0.3": "local_batch_size global_batch_size seq_len disable_cuda_graphs",
    "main": "num_tokens_per_microbatch_per_dp_rank num_tokens_per_train_step max_context_length disable_cuda_graphs",
}
"""The fields of torchtitan's dataclasses that a plan sets, in release 0.3 and in August 2026; both take no others."""


def configuration(release: str, layers: int = 6) -> types.SimpleNamespace:
    """A Trainer.Config as far as the module looks at it."""

    def part(names: str) -> object:
        return make_dataclass("Part", [(name, object, field(default=None)) for name in names.split()], slots=True)()

    model = types.SimpleNamespace(layers=[None] * layers)
    made = types.SimpleNamespace(
        model_spec=types.SimpleNamespace(model=model),
        parallelism=part(PARALLELISM[release]),
        training=part(TRAINING[release]),
    )
    if release == "main":
        made.training.max_context_length = 100
    return made


@pytest.mark.parametrize("release", PARALLELISM)
def test_the_torchtitan_module_writes_the_fields_that_are_there(tmp_path, release):
    plan = replace(uneven(), replicas=3, global_batch=24)
    write("torchtitan", tmp_path, plan)
    config = load(tmp_path / "autopipe_torchtitan.py").planned(configuration(release))
    set_ = {f.name: getattr(config.parallelism, f.name) for f in fields(config.parallelism)}
    assert Path(set_.pop("pipeline_parallel_schedule_csv")) == tmp_path / "schedule.csv"
    assert [name for part in set_.pop("module_fqns_per_model_part") for name in part] == [
        "tok_embeddings",
        *(f"layers.{i}" for i in range(6)),
        "norm",
        "lm_head",
    ]
    assert set_.pop("pipeline_parallel_microbatch_size" if release == "0.3" else "num_pp_microbatches") == (
        2 if release == "0.3" else 4
    )
    assert set_ == {
        "pipeline_parallel_degree": 2,
        "data_parallel_replicate_degree": 3,
        "pipeline_parallel_schedule": "1F1B",
    }
    training = {f.name: getattr(config.training, f.name) for f in fields(config.training)}
    assert (
        training
        == {
            "0.3": {"local_batch_size": 8, "global_batch_size": 24, "seq_len": None, "disable_cuda_graphs": True},
            "main": {
                "num_tokens_per_microbatch_per_dp_rank": 200,
                "num_tokens_per_train_step": 2400,
                "max_context_length": 100,
                "disable_cuda_graphs": True,
            },
        }[release]
    )


def test_the_torchtitan_module_refuses_a_model_of_another_length(tmp_path):
    write("torchtitan", tmp_path)
    with pytest.raises(ValueError, match=r"a model of 6 layers.*has 5"):
        load(tmp_path / "autopipe_torchtitan.py").planned(configuration("main", layers=5))


def test_torchtitan_parses_the_module(tmp_path, monkeypatch):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    write("torchtitan", tmp_path, plan_of(llama(6), [2, 5, 6], interleaved(2, 2, 4)))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = manager.ConfigManager().parse_args(["--module", "autopipe_torchtitan", "--config", "config"])
    assert config.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    assert len(config.parallelism.module_fqns_per_model_part) == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchtitan_trains_as_in_one_process():
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "torchtitan_parity.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"differs by", done.stdout)) == 3


# --- DeepSpeed ---


@dataclass
class Topology:
    """Stage = rank."""

    def get_coord(self, rank: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(pipe=rank)


class PipelineModule:
    """What DeepSpeed's constructor calls of a subclass, for a rank."""

    global_rank = 0

    def __init__(self, layers: list[object], **options: object) -> None:
        self._topo = Topology()
        self._partition_layers(method="parameters")

    def _set_bounds(self, start: int, stop: int) -> None:
        self.own = (start, stop)


def test_the_deepspeed_subclass_sets_the_plan_s_bounds(tmp_path, monkeypatch):
    stand_in = types.ModuleType("deepspeed.pipe")
    stand_in.PipelineModule = PipelineModule
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", stand_in)
    write("deepspeed", tmp_path)
    planned = load(tmp_path / "deepspeed_pipeline.py").PlannedPipeline
    found = []
    for rank in range(2):
        monkeypatch.setattr(PipelineModule, "global_rank", rank)
        made = planned([object()] * 9)
        found.append(made.own)
        assert made.parts == [0, 3, 9]
        assert all(type(bound) is int for bound in made.parts)
    assert found == [(0, 3), (3, 9)]
    with pytest.raises(ValueError, match="9 layers on 2 stages, here: 8 on 2"):
        planned([object()] * 8)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # its first start compiles an extension for minutes, more on a busy machine
def test_deepspeed_trains_as_plain_torch(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    import torch

    from tests.deepspeed_rank import STEPS, batches, layers

    write("deepspeed", tmp_path)
    done = torchrun(2, tmp_path, str(ROOT / "tests" / "deepspeed_rank.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["own"] for rank in ranks] == [[0, 3], [3, 9]]
    model = torch.nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, expected = batches(2), []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(4):
            inputs, target = next(data)
            loss = torch.nn.functional.mse_loss(model(inputs), target) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected, rel=1e-5)


# --- NeMo AutoModel, Accelerate ---


def test_the_automodel_section_is_yaml_with_the_dataclass_s_fields(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    write("automodel", tmp_path)
    section = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    pipeline = section["distributed"]["pipeline"]
    assert set(pipeline) == {
        "pp_schedule",
        "pp_schedule_csv",
        "pp_microbatch_size",
        "pp_batch_size",
        "scale_grads_in_schedule",
        "module_fqns_per_model_part",
    }  # of PipelineConfig in NeMo AutoModel 0.7
    assert pipeline["pp_batch_size"] // pipeline["pp_microbatch_size"] == 4
    names = [name for part in pipeline["module_fqns_per_model_part"] for name in part]
    assert names.count("model.rotary_emb") == 2
    assert [name for name in names if name != "model.rotary_emb"] == [layer.name for layer in llama(6).layers]


def test_automodel_is_not_given_fewer_micro_batches_than_ranks():
    few = plan_of(llama(6), [3], one_f_one_b(2, 1))
    with pytest.raises(CannotExport, match=r"at least as many micro-batches as ranks, the plan has 1 on 2"):
        export.trainer("automodel").files(few)


def test_automodel_s_own_dataclass_takes_the_fields(tmp_path):
    config = pytest.importorskip(
        "nemo_automodel.components.distributed.pipelining.config", reason="NeMo AutoModel is not installed"
    )
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    write("automodel", tmp_path)
    section = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    made = config.PipelineConfig(**section["distributed"]["pipeline"])
    assert made.pp_microbatch_size == 2


@pytest.fixture
def model():
    """A Llama of six blocks, without memory."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def device_map() -> dict[str, int]:
    names: dict[str, dict[str, int]] = {}
    exec(export.trainer("device-map").files(uneven())["device_map.py"], names)
    return names["device_map"]


def test_a_device_map_has_each_parameter_once(model):
    for name, _ in model.named_parameters():
        assert sum(name.startswith(f"{key}.") for key in device_map()) == 1, name
    assert (device_map()["model.layers.1"], device_map()["model.layers.2"]) == (0, 1)


def test_accelerate_takes_the_device_map(model):
    utils = pytest.importorskip("accelerate.utils", reason="Accelerate is not installed")
    utils.check_device_map(model, device_map())


def test_split_points_are_modules_of_the_model():
    names: dict[str, object] = {}
    exec(export.trainer("accelerate").files(uneven())["split_points.py"], names)
    assert names["split_points"] == ["model.layers.2"]
    assert names["num_chunks"] == 4
